"""The options of `--on kubernetes`, and the names and quantities that Kubernetes accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import UserError

KINDS = ("job", "pytorchjob")
# Pods are called <job>-<index>, and a name may have 63 characters.
_LONGEST_NAME = 52
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")


@dataclass(frozen=True)
class KubernetesOptions:
    """As given; None: not given."""

    image: str | None = None
    kind: str = KINDS[0]
    namespace: str | None = None
    cpus: int | None = None  # cores of each worker
    gpus: int | None = None  # of each node
    memory: str | None = None  # of each node
    shm: str | None = None  # the largest size of /dev/shm
    volume: tuple[str, ...] = ()  # CLAIM:PATH
    token_secret: str | None = None  # NAME or NAME/KEY
    output: Path | None = None  # None: standard output

    def __post_init__(self) -> None:
        if not self.image:
            raise UserError(
                "--on kubernetes: --image is missing. Name the container image that has Python, "
                "Farandole and the script, as in --image registry.example/train:1"
            )
        if self.kind not in KINDS:
            raise UserError(f"--kind {self.kind}: choose one of {', '.join(KINDS)}.")
        for option, text in (("--memory", self.memory), ("--shm", self.shm)):
            if text is not None and not _QUANTITY.fullmatch(text):
                raise UserError(f"{option} {text}: write a quantity of Kubernetes, such as 16Gi.")
        if self.namespace is not None and not _is_label(self.namespace, 63):
            raise UserError(
                f"--namespace {self.namespace!r}: a namespace has lower-case letters, digits and -."
            )
        _ = self.mounts, self.token_source

    @property
    def mounts(self) -> tuple[tuple[str, str], ...]:
        """Claims and where they are mounted."""
        parts = [text.partition(":") for text in self.volume]
        for text, (claim, _, path) in zip(self.volume, parts, strict=True):
            if not _SUBDOMAIN.fullmatch(claim) or not path.startswith("/") or ":" in path:
                raise UserError(
                    f"--volume {text}: write CLAIM:PATH, the name of a PersistentVolumeClaim and "
                    "where it is mounted, such as results:/app/runs"
                )
        paths = [path for _, _, path in parts]
        if len(set(paths)) < len(paths) or "/dev/shm" in paths:
            raise UserError(
                f"--volume {' --volume '.join(self.volume)}: each needs a path of its own, and "
                "/dev/shm is taken."
            )
        return tuple((claim, path) for claim, _, path in parts)

    @property
    def token_source(self) -> tuple[str, str] | None:
        """The Secret with the job's token, and the key in it."""
        if self.token_secret is None:
            return None
        name, _, key = self.token_secret.partition("/")
        key = key or "token"
        if not _SUBDOMAIN.fullmatch(name) or not _KEY.fullmatch(key):
            raise UserError(
                f"--token-secret {self.token_secret}: write NAME or NAME/KEY of a Secret, such as "
                "train-token/token. The token itself does not belong on a command line."
            )
        return name, key


def job_name(name: str | None, script: str) -> str:
    """The name of the Job: that of the run, or else of the script. Raises `UserError`."""
    if name is None:
        found = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
        name = found[:_LONGEST_NAME].rstrip("-") or "train"
    if not _is_label(name, _LONGEST_NAME):
        raise UserError(
            f"--name {name!r} cannot be the name of a Job: use at most {_LONGEST_NAME} lower-case "
            "letters, digits and -, such as --name resnet-50"
        )
    return name


def _is_label(text: str, longest: int) -> bool:
    return len(text) <= longest and _LABEL.fullmatch(text) is not None

"""The engines of `farandole run --on`. Another one is a folder in `backends`, and a line here.

An engine is a module with a function `start(request: EngineRequest) -> int`, which starts the job,
submits it or writes what starts it, and returns the exit code of the command.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from farandole.errors import UserError, nearest
from farandole.launch.engines.request import EngineRequest

LOCAL, SSH, MPI, KUBERNETES = "local", "ssh", "mpi", "kubernetes"
_BACKENDS = "farandole.launch.backends"


@dataclass(frozen=True)
class Engine:
    """How workers are started."""

    meaning: str
    module: str | None = None  # None: by `farandole run` itself
    options: tuple[str, ...] = ()  # its own, besides `nodes` and `per_node`, by parameter name
    is_own_launcher: bool = True  # False: another program starts the workers and watches them
    has_script: bool = True  # False: the script need not be on this host
    counts_workers: bool = False  # -n may stand for `nodes` and `per_node`

    def start(self, request: EngineRequest) -> int:
        """Returns the exit code of the command."""
        assert self.module is not None
        found = importlib.import_module(f"{_BACKENDS}.{self.module}").start
        return cast(Callable[[EngineRequest], int], found)(request)


ENGINES = {
    LOCAL: Engine("workers of this host"),
    SSH: Engine("workers of other hosts, by ssh"),
    "slurm": Engine(
        "submits a batch job, or uses the allocation that it runs in",
        "slurm.engine",
        ("partition", "time_limit", "account", "slurm_option", "cpus", "gpus", "output", "dry_run"),
    ),
    MPI: Engine(
        "Open MPI's mpirun",
        "mpi.engine",
        ("dry_run",),
        is_own_launcher=False,
        counts_workers=True,
    ),
    "ray": Engine("nodes of a Ray cluster", "ray.engine", ("cpus", "gpus", "ray_address")),
    KUBERNETES: Engine(
        "writes a manifest",
        "kubernetes.engine",
        (
            *("image", "kind", "namespace", "cpus", "gpus", "memory", "shm", "volume"),
            *("token_secret", "output"),
        ),
        is_own_launcher=False,
        has_script=False,
    ),
}


def find_engine(name: str) -> Engine:
    """Raises `UserError` for an unknown one."""
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        hint = nearest(name, ENGINES)
        listed = "" if hint.startswith("Known") else f"{hint} "
        raise UserError(f"--on {name}: there is no such engine. {listed}Known: {known}.")
    return ENGINES[name]

"""What the driver says of this host's GPUs. Asks `nvidia-smi`: no CUDA context, and no torch."""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.errors import UserError

_PROGRAM = "nvidia-smi"
_WARNING = "WARNING:"  # stands below the answer, as of a damaged infoROM
_SECONDS = 60.0  # without the persistence mode the driver initialises each GPU first


@dataclass(frozen=True)
class Gpu:
    """One GPU, by the order of its address on the bus."""

    index: int
    uuid: str
    name: str
    compute_mode: str  # Default, Exclusive_Process or Prohibited
    is_divided: bool  # in MIG mode

    @property
    def is_exclusive(self) -> bool:
        """One process at a time may use it."""
        return self.compute_mode.lower().startswith("exclusive")

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True)
class GpuProcess:
    """A process that has a CUDA context on a GPU."""

    pid: int
    name: str
    uuid: str  # of the GPU


@dataclass(frozen=True)
class GpuUse:
    """At one moment. None: the driver does not tell."""

    uuid: str
    busy_percent: float | None
    used_mib: float | None
    total_mib: float | None


def list_gpus() -> list[Gpu]:
    """All GPUs of this host, whatever CUDA_VISIBLE_DEVICES says. Raises `UserError`."""
    fields = ("index", "uuid", "name", "compute_mode", "mig.mode.current")
    found = []
    for index, uuid, name, mode, mig in _rows("gpu", fields):
        if not index.isdecimal():  # [N/A], [GPU is lost]
            raise UserError(
                f"{_PROGRAM} --query-gpu says index={index} of the GPU with UUID {uuid} ({name}), "
                f"and --per-gpu needs all GPUs. Is it broken? Look at it: {_PROGRAM} -q"
            )
        found.append(Gpu(int(index), uuid, name, mode, mig.lower() == "enabled"))
    return found


def list_processes() -> list[GpuProcess]:
    """Those that compute on GPUs, as far as the driver shows them. Raises `UserError`."""
    found = []
    for line in _query("compute-apps", ("pid", "gpu_uuid", "process_name")):
        with contextlib.suppress(ValueError):  # [N/A], No running processes found
            pid, uuid, name = map(str.strip, line.split(",", 2))  # a name may have commas
            found.append(GpuProcess(int(pid), name, uuid))
    return found


def gpu_use() -> list[GpuUse]:
    """What each GPU does now. Raises `UserError`."""
    fields = ("uuid", "utilization.gpu", "memory.used", "memory.total")
    return [
        GpuUse(uuid, *(_number(text) for text in (busy, used, total)))
        for uuid, busy, used, total in _rows("gpu", fields)
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _rows(what: str, fields: Sequence[str]) -> list[list[str]]:
    lines = [line for line in _query(what, fields) if not line.startswith(_WARNING)]
    rows = [row for row in csv.reader(lines, skipinitialspace=True) if row]
    for row in rows:
        if len(row) != len(fields):
            raise UserError(
                f"{_question(what, fields)} says what is not understood: {', '.join(row)[:200]!r}. "
                "Is that NVIDIA's own program?"
            )
    return rows


def _query(what: str, fields: Sequence[str]) -> list[str]:
    """The lines of the answer."""
    path = shutil.which(_PROGRAM)
    if path is None:
        raise UserError(
            f"there is no {_PROGRAM} on the PATH, so that no NVIDIA GPU is found on this host. "
            "Install the driver, or start the container with `--gpus all`."
        )
    question = _question(what, fields)
    command = [path, *question.split()[1:], "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{question} does not answer: {error}. Ask it by hand, as in `{_PROGRAM} -L`."
        ) from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise UserError(
            f"{question} failed (exit code {done.returncode}): "
            f"{said[0] if said else 'it says nothing'}. Is the driver loaded, and are the GPUs "
            "given to this container?"
        )
    return done.stdout.splitlines()


def _question(what: str, fields: Sequence[str]) -> str:
    return f"{_PROGRAM} --query-{what}={','.join(fields)}"

"""Who else uses the GPUs: MPS daemons of others, and compute modes that leave no room for ours."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from farandole.errors import UserError
from farandole.launch.gpu.mps_control import DEFAULT_PIPES, PIPE_DIRECTORY, answers
from farandole.launch.gpu.nvidia_smi import Gpu, GpuProcess

_NAME = "nvidia-cuda-mps"  # the kernel keeps 15 letters: control daemons and servers
_ANSWER_SECONDS = 10.0


def check_modes(gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> None:
    """Raises `UserError` for a GPU that workers under a new MPS daemon cannot use."""
    for gpu in gpus:
        if gpu.is_divided:
            raise UserError(
                f"{gpu} is in MIG mode, divided into parts that have one MPS daemon each; "
                f"--per-gpu is for whole GPUs. End MIG mode (nvidia-smi -i {gpu.index} -mig 0), or "
                "leave --per-gpu out."
            )
        if gpu.compute_mode.lower() == "prohibited":
            raise UserError(
                f"{gpu} is in compute mode {gpu.compute_mode}: nobody may compute on it. An "
                f"administrator can change that: nvidia-smi -i {gpu.index} -c DEFAULT"
            )
        users = [process for process in processes if process.uuid == gpu.uuid]
        if gpu.is_exclusive and users:
            named = ", ".join(f"{user.name} (process {user.pid})" for user in users)
            raise UserError(
                f"{gpu} is in compute mode {gpu.compute_mode} and is used by {named}, so that an "
                "MPS daemon of our own cannot use it. If that is an MPS server, use its daemon: "
                f"export {PIPE_DIRECTORY}={DEFAULT_PIPES} (or its own folder). Else wait for its "
                f"end, or have the mode changed: nvidia-smi -i {gpu.index} -c DEFAULT"
            )


def describe_others(processes: Sequence[GpuProcess], pipes: Path = DEFAULT_PIPES) -> str | None:
    """What to tell of an MPS daemon that was there before ours; None: there is none."""
    servers = {process.pid for process in processes if Path(process.name).name.startswith(_NAME)}
    named = [_named(pid) for pid in sorted(servers | _daemons())]
    if answers(pipes, _ANSWER_SECONDS):
        named.append(f"one that listens in {pipes}")
    if not named:
        return None
    return (
        f"another MPS daemon runs on this host ({', '.join(named)}). Ours has its own folder, and "
        "the two take turns on a GPU that both use, which costs both of them time. To share one "
        f"daemon, set {PIPE_DIRECTORY} to its folder (often {DEFAULT_PIPES})"
    )


def _daemons() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(_NAME) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def _named(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {pid} of {psutil.Process(pid).username()}"
    return f"process {pid}"  # in another container

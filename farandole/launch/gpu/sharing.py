"""Several workers on each GPU (AccDP): how many there are, and what each must be told.

One worker with a small batch leaves most of a GPU idle. K workers under MPS fill it, each with a
batch of its own, and exchange gradients as workers on different GPUs do. Worker r of the host has
GPU r // K: neighbours share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farandole.environment import PER_GPU
from farandole.errors import UserError
from farandole.launch.gpu.mps import MpsDaemon
from farandole.launch.gpu.mps_control import (
    PIPE_DIRECTORY,
    THREAD_PERCENTAGE,
    answers,
    control_program,
)
from farandole.launch.gpu.nvidia_smi import Gpu, GpuProcess, list_gpus, list_processes
from farandole.launch.gpu.others import check_modes, describe_others
from farandole.launch.gpu.visible import VARIABLE, count_visible, visible_gpus
from farandole.launch.job import Job, Outcome
from farandole.launch.messages import tell
from farandole.worker.signals import Stopped, undisturbed

AUTO = "auto"
_ANSWER_SECONDS = 10.0
_MOST_DIGITS = 4
_SHOWN_LETTERS = 20
_MPS_CLIENTS = 48  # of one GPU, since Volta; some newer drivers allow more
# `fd.init` sets the same (`comm/gpu_sharing`); here it is for scripts that call torch.distributed
# alone. With as many blocks as NCCL takes by default, the ranks of a GPU wait for each other for
# ever: the kernels of one leave no room for those of the others.
_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


@dataclass(frozen=True)
class GpuSharing:
    """`per_gpu` workers on each of `gpus` GPUs, under an MPS daemon for those with `uuids`.

    Without UUIDs none is started: nobody shares a GPU, or the user's own daemon serves them.
    """

    per_gpu: int
    gpus: int
    uuids: tuple[str, ...] = ()
    threads_percent: float | None = None

    @property
    def workers(self) -> int:
        return self.per_gpu * self.gpus

    @property
    def variables(self) -> dict[str, str]:
        """What the workers are told. What the user has set for NCCL stays."""
        told = {PER_GPU: str(self.per_gpu)}
        if self.per_gpu > 1:
            if self.threads_percent is not None:
                told[THREAD_PERCENTAGE] = f"{self.threads_percent:g}"
            told |= {name: value for name, value in _NCCL.items() if name not in os.environ}
        return told


def parse_per_gpu(text: str) -> int | None:
    """The number of workers a GPU; None: `auto`. Raises `UserError`."""
    if text == AUTO:
        return None
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        shown = text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
        raise UserError(
            f"--per-gpu {shown}: give a number of workers a GPU, 1 or more, such as 4, or {AUTO}."
        )
    return int(text)


def check_threads(percent: float | None) -> None:
    """Raises `UserError` for what is no share of a GPU."""
    if percent is not None and not 0 < percent <= 100:
        raise UserError(
            f"--gpu-threads {percent:g}: give the percentage of a GPU's threads that each worker "
            "may use at a time, above 0 and up to 100."
        )


def check_count(asked: int | None, per_gpu: int, gpus: int) -> None:
    """Raises `UserError` where -n says something else."""
    if asked is not None and asked != per_gpu * gpus:
        raise UserError(
            f"-n {asked} and --per-gpu {per_gpu}: {per_gpu} workers on each of {gpus} GPU(s) make "
            f"{per_gpu * gpus}. Leave -n out, or choose GPUs with {VARIABLE}."
        )


def plan_sharing(
    per_gpu: int, threads_percent: float | None = None, workers: int | None = None
) -> GpuSharing:
    """Looks at the GPUs of this host; starts nothing. `workers` is what -n says.

    Raises `UserError` where GPUs or MPS are not there, or not free.
    """
    gpus = list_gpus()
    if per_gpu > 1:
        control_program()
        if per_gpu > _MPS_CLIENTS:
            tell(
                f"--per-gpu {per_gpu}: most drivers let MPS serve {_MPS_CLIENTS} processes a GPU, "
                "and further workers may fail"
            )
        theirs = _daemon_of_the_user()
        if theirs is not None:
            count = count_visible(gpus, os.environ)
            check_count(workers, per_gpu, count)
            tell(f"the MPS daemon in {theirs} ({PIPE_DIRECTORY}) is used, and not ended")
            return GpuSharing(per_gpu, count, threads_percent=threads_percent)
    visible = visible_gpus(gpus, os.environ)
    check_count(workers, per_gpu, len(visible))
    if per_gpu == 1:  # nobody shares anything
        check_modes(visible, [])  # only a daemon of ours minds who else is there
        return GpuSharing(per_gpu, len(visible), threads_percent=threads_percent)
    processes = _processes(visible)
    check_modes(visible, processes)
    if (others := describe_others(processes)) is not None:
        tell(others)
    return GpuSharing(per_gpu, len(visible), tuple(gpu.uuid for gpu in visible), threads_percent)


def _processes(gpus: Sequence[Gpu]) -> list[GpuProcess]:
    """As far as they can be told. Raises `UserError` where a GPU's mode makes it matter who else
    is there; else it is only for what the user is told."""
    try:
        return list_processes()
    except UserError:
        if any(gpu.is_exclusive for gpu in gpus):
            raise
        return []


def launch_sharing(sharing: GpuSharing, job: Job, launch: Callable[[Job], Outcome]) -> Outcome:
    """Runs `job` by `launch`, with an MPS daemon of its own where one is needed.

    Raises `LaunchError` where the daemon does not start, and `LostResourceError` where it ends
    before the job does.
    """
    job = replace(job, environment={**job.environment, **sharing.variables})
    if not sharing.uuids:
        return launch(job)
    try:
        daemon = MpsDaemon(sharing.uuids)
    except Stopped as stopped:
        return Outcome(stopped_by=stopped.name)
    try:
        variables = {**job.environment, **daemon.variables}
        return launch(replace(job, environment=variables, check=daemon.check))
    finally:
        with undisturbed():
            daemon.close()


def _daemon_of_the_user() -> Path | None:
    """Where a daemon listens that the user has named."""
    named = os.environ.get(PIPE_DIRECTORY)
    if not named:
        return None
    if answers(Path(named), _ANSWER_SECONDS):
        return Path(named)
    tell(f"{PIPE_DIRECTORY}={named}: no MPS daemon answers there; the job starts one of its own")
    return None

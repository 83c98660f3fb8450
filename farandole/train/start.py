"""`fd.init`: from how this process was started to the `Run` that the script holds."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from farandole.comm import Group, check_transport
from farandole.comm.transports.simulated.transport import SimulatedLinks
from farandole.environment import PER_GPU
from farandole.errors import UserError
from farandole.system.activity import show_activity
from farandole.system.orphans import end_with_launcher
from farandole.train.checkpoint.automatic.policy import Checkpoints, parse_checkpoints
from farandole.train.current_run import make_current
from farandole.train.elastic.start import join_elastic, most_workers
from farandole.train.elastic.support import require_elastic_device, require_elastic_settings
from farandole.train.randomness import seed_everything
from farandole.train.run import Run
from farandole.train.settings import Settings, pretended_hosts
from farandole.train.stopping.ending import Ending
from farandole.train.tracing import Tracing, start_tracing
from farandole.worker.environment import RankAssignment, detect
from farandole.worker.failure import record_uncaught
from farandole.worker.join import join, leave
from farandole.worker.marker_files import record_joined
from farandole.worker.threads import share_cores


def init(
    *,
    seed: int | None = 0,
    timeout: timedelta | float = 60.0,
    transport: str = "auto",
    name: str | None = None,
    folder: str | Path = "runs",
    check_in_step: bool = True,
    check_finite: bool = True,
    fallback: bool = False,
    checkpoints: Checkpoints | str | None = None,
) -> Run:
    """Joins the job that this process belongs to, or runs alone as rank 0 of 1.

    Seeds `random`, `numpy.random` and torch (CPU and GPUs) with `seed`, the same on every rank.
    None leaves them alone; `farandole run --seed` takes precedence over it.

    Every wait for other ranks ends after `timeout` (seconds, or a timedelta) with an error that
    names them. `transport` is what carries the bytes: `auto`, `shm`, `c10d` (gloo, NCCL) or `mpi`;
    `farandole run --transport` takes precedence over it. Metrics and checkpoints go to
    `folder/name`. After each pass over the training data all ranks compare a digest of their
    parameters, and stop if they differ, unless `check_in_step` is False. A gradient that is not
    finite stops all ranks with a `DivergedError` before it is applied, unless `check_finite` is
    False; `farandole run --no-check-finite` takes precedence over it. With `fallback`, or
    `farandole run --fallback`, `run.load` skips damaged checkpoints and takes the newest good one.
    With `checkpoints`, such as `fd.Checkpoints(every="10min")` or its text, or with `farandole run
    --checkpoint`, which takes precedence, the run saves by itself, and `run.epochs` goes on from
    the newest checkpoint that it finds.
    """
    check_transport(transport)
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise UserError(f"timeout={timeout} must be above 0 seconds.")
    assignment = detect(os.environ)
    most = most_workers()
    _follow_launcher(assignment.launcher == "farandole" or most is not None)
    settings = Settings.from_environ(os.environ)
    if settings.script is None:
        settings = replace(settings, script=sys.argv[0] or "run")
    elastic = None
    if most is not None:
        device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
        require_elastic_device(device)
        require_elastic_settings(settings)
        group, elastic = join_elastic(limit, settings.transport or transport)
    else:
        group, device = _join_job(assignment, settings, limit, settings.transport or transport)
    chosen = settings.seed if settings.seed is not None else seed
    if chosen is not None:
        seed_everything(chosen)
    tracing = start_tracing(settings, group)
    run = Run(
        group,
        group.topology,
        device,
        settings=settings,
        name=name,
        folder=Path(folder),
        seed=chosen or 0,
        check_in_step=check_in_step,
        check_finite=check_finite,
        fallback=fallback,
        checkpoints=parse_checkpoints(checkpoints) if isinstance(checkpoints, str) else checkpoints,
        elastic=elastic,
    )
    make_current(run)
    # What is here stays to the end. Without this the interpreter looks through all of torch once
    # more before it ends, for a second.
    gc.freeze()
    _register_exit(run, group, tracing)
    return run


def _follow_launcher(is_ours: bool) -> None:
    """Reports to our launcher, if one has started this, from now on, and ends when it does."""
    # Before anything that can fail or wait, also before a setting that cannot be read: the launcher
    # must learn of it, and must not be outlived.
    if is_ours:
        record_joined()
        record_uncaught()
        end_with_launcher(os.environ)


def _join_job(
    assignment: RankAssignment, settings: Settings, limit: timedelta, transport: str
) -> tuple[Group, torch.device]:
    """Chooses this worker's cores and device, and connects it to the others."""
    share_cores(assignment, os.environ)
    device, ranks_per_gpu = pick_device(assignment)
    activity = show_activity(os.environ)
    activity.begin_wait()
    group = join(
        assignment,
        device,
        ranks_per_gpu=ranks_per_gpu,
        timeout=limit,
        transport=transport,
        links=_simulated_links(settings, assignment.size),
    )
    activity.end_wait()
    group.meter.activity = activity
    if settings.pretend_hosts is not None:
        group.transport.topology = pretended_hosts(settings.pretend_hosts, group.size)
    return group, device


def _simulated_links(settings: Settings, workers: int) -> SimulatedLinks | None:
    """Between pretended hosts, where `farandole run --link` asks for them."""
    link, file = settings.simulated_link, settings.simulated_link_file
    if link is None or file is None or settings.pretend_hosts is None:
        return None
    return SimulatedLinks(pretended_hosts(settings.pretend_hosts, workers), link, file)


def _register_exit(run: Run, group: Group, tracing: Tracing | None) -> None:
    """Registers what happens at the end of the script."""
    # The last that is registered is called first: the run is closed, the trace is written, the
    # group is left, and only then may a failure end the process with 1.
    ending = Ending(run)
    atexit.register(ending.leave)
    if group.size > 1 or group.units is not None:
        atexit.register(leave, group)
    if tracing is not None:
        atexit.register(tracing.close)
    atexit.register(ending.close)


def pick_device(
    assignment: RankAssignment, environ: Mapping[str, str] = os.environ
) -> tuple[torch.device, int]:
    """A GPU for each rank, as far as they go, and the most ranks that share one on this host.

    With `--per-gpu K` the first K ranks of a host are on its first GPU, and so on. Raises
    `UserError` where torch sees other GPUs than the launcher has counted.
    """
    count = torch.cuda.device_count()
    asked = environ.get(PER_GPU)
    if count == 0:
        if asked and assignment.local_rank == 0:
            built = torch.version.cuda
            why = f"was built for CUDA {built}" if built else "was built without CUDA"
            warnings.warn(
                f"--per-gpu {asked}: torch {torch.__version__} finds no GPU ({why}), and all "
                "workers train on CPUs. Install a torch for CUDA, or ask `farandole doctor`.",
                stacklevel=3,
            )
        return torch.device("cpu"), 1
    if asked and assignment.local_size != int(asked) * count:
        raise UserError(
            f"--per-gpu {asked}: {assignment.local_size} workers were started on this host, and "
            f"torch sees {count} GPU(s) here, which makes {int(asked) * count}. If the MPS daemon "
            "is your own, it shows other GPUs than the launcher counts: name those that it serves, "
            f"as in CUDA_VISIBLE_DEVICES={','.join(map(str, range(count)))}."
        )
    together = -(-assignment.local_size // count)
    if asked is None and together > 1 and assignment.local_rank == 0:
        warnings.warn(
            f"{assignment.local_size} workers share {count} GPU(s) on this host, and take turns on "
            f"them. `farandole run --per-gpu {together}` lets them run at the same time.",
            stacklevel=3,
        )
    place = assignment.local_rank // int(asked) if asked else assignment.local_rank
    device = torch.device("cuda", place % count)
    torch.cuda.set_device(device)
    return device, int(asked) if asked else together

"""What benchmarks share: files found writable before they start, and how to say that one failed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole.errors import LaunchError, UserError

if TYPE_CHECKING:
    from farandole.launch.gpu.sharing import GpuSharing
    from farandole.launch.job import Job, Outcome
    from farandole.launch.placement.placement import Placement


def check_output(option: str, path: Path) -> Path:
    """The file to write, found writable now rather than after minutes of measuring."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise UserError(f"{option} {path} is not a file. Give the name of a file to write.")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written: {target.parent}: {error.strerror}. "
            "Give a file in a folder that exists and that you can write to."
        ) from error
    return target


def run_placed(
    job: Job, placement: Placement | None, *outputs: str, sharing: GpuSharing | None = None
) -> None:
    """Runs a benchmark to its end: on this host, there also by workers that share its GPUs, or
    where `placement` says.

    `outputs` are the options by which rank 0 writes files. Raises `UserError` where it would write
    them on another host.
    """
    from farandole.launch.launcher import launch
    from farandole.launch.placement.launch import launch_placed
    from farandole.launch.probes.crowding import warn_if_crowded

    if sharing is not None:
        from farandole.launch.gpu.sharing import launch_sharing

        finish(launch_sharing(sharing, job, launch))
        return
    if placement is None:
        warn_if_crowded(job.workers, "-n ")
        finish(launch(job))
        return
    if outputs and not placement.rank0_is_here:
        first = placement.topology.host(0).name
        raise UserError(
            f"{outputs[0]}: rank 0 is on host {first}, and would write the file there. Put this "
            "host first in -H."
        )
    finish(launch_placed(job, placement))


def finish(outcome: Outcome) -> None:
    """The workers have said everything themselves; here is how it ended."""
    if outcome.stopped_by is not None:
        stopped(outcome.stopped_by)
    if outcome.failure is not None:
        raise LaunchError(
            f"the benchmark failed: {outcome.failure}\nEvery rank's output is in {outcome.logs}."
        )


def stopped(signal_name: str) -> None:
    from farandole.worker.signals import exit_code_of

    click.echo(f"farandole: stopped by {signal_name}; no worker is left", err=True)
    sys.exit(exit_code_of(signal_name))

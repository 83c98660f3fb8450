"""Runs a job where a `Placement` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from farandole.environment import STARTED
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.crowding import warn_if_crowded


def launch_placed(
    job: Job,
    placement: Placement,
    *,
    files: Sequence[str] = (),
    shared_folders: Sequence[Path] = (),
) -> Outcome:
    """Raises `LaunchError`, before any worker starts, naming each host that cannot take part.

    The script and further `files` must be on every host, and all must see the `shared_folders` of
    this one.
    """
    placement.tell_note()
    warn_if_crowded(placement.workers_here)
    if not placement.rank0_is_here:
        # Nobody on another host can redraw lines of this terminal, or read this host's clock.
        variables = {**job.environment, STARTED: ""}
        job = replace(job, rank0_owns_terminal=False, environment=variables)
    return launch_on_hosts(
        job,
        placement.topology,
        placement.channel,
        placement.interfaces,
        files=files,
        shared_folders=shared_folders,
    )

"""Runs a job where a `Placement` says, after a look at the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from farandole.environment import STARTED
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.messages import tell
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.host_check import JobFiles, marker
from farandole.launch.probes.preflight import check_hosts


def launch_placed(
    job: Job,
    placement: Placement,
    *,
    script: str | None = None,
    files: Sequence[str] = (),
    shared_folders: Sequence[Path] = (),
) -> Outcome:
    """Raises `LaunchError`, before any worker starts, naming each host that cannot take part.

    `script` and further `files` must be on every host, and all must see the `shared_folders` of
    this one.
    """
    with ExitStack() as stack:
        shared = [stack.enter_context(marker(folder)) for folder in shared_folders]
        check_hosts(placement, JobFiles(str(Path.cwd()), script, tuple(files), tuple(shared)))
    if not placement.rank0_is_here:
        # Nobody on another host can redraw lines of this terminal, or read this host's clock.
        variables = {**job.environment, STARTED: ""}
        job = replace(job, rank0_owns_terminal=False, environment=variables)
    if placement.others and job.stall_seconds is not None:
        others = ", ".join(placement.others)
        tell(f"--stall watches the workers of this host, not those of {others}")
    return launch_on_hosts(job, placement.topology, placement.ssh, placement.interfaces)

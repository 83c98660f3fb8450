"""Whether a race can read what its lanes write: rank 0 may be on another host."""

from __future__ import annotations

from pathlib import Path

from farandole.errors import FarandoleError, LaunchError
from farandole.launch.host_facts import JobFiles
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.host_check import marker
from farandole.launch.probes.problems import require
from farandole.launch.probes.survey import sessions, survey
from farandole.train.claim import Claim


def check_shared(placement: Placement, folder: Claim) -> None:
    """Raises `LaunchError` where rank 0 is on a host that does not see `folder`, and releases it.

    Rank 0 writes its metrics there, and the race reads them.
    """
    if placement.rank0_is_here:
        return
    first = placement.topology.host(0).name
    try:
        with marker(folder.parent / folder.name) as seen:
            files = JobFiles(str(Path.cwd()), shared=(seen,))
            with sessions([first], placement.channel) as probes:
                (report,) = survey(probes, files, placement.channel, placement.interfaces)
        require(report.problems)
    except FarandoleError as error:
        folder.release()
        raise LaunchError(
            f"{error}\nRank 0 of each lane is on host {first}, and writes its metrics there. Put "
            "this host first in -H, or name with --runs a folder that both hosts share."
        ) from error

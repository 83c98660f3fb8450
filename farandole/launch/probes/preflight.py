"""A look at all hosts of a race, whose first lane may leave out some of them."""

from __future__ import annotations

from farandole.launch.host_facts import JobFiles
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.crowding import crowding, warn_if_crowded
from farandole.launch.probes.problems import Problem, require, tell_warnings
from farandole.launch.probes.survey import sessions, survey


def check_hosts(placement: Placement, files: JobFiles) -> None:
    """Raises `LaunchError` naming every host at fault; warnings are told.

    No process of it is left on any host. Only other hosts are asked.
    """
    placement.tell_note()
    warn_if_crowded(placement.workers_here)
    problems: list[Problem] = []
    if placement.others:
        with sessions(placement.others, placement.channel) as probes:
            reports = survey(probes, files, placement.channel, placement.interfaces)
        workers = {host.name: len(host.ranks) for host in placement.topology.hosts}
        for report in reports:
            problems += report.problems
            if (facts := report.facts) is not None:
                problems += crowding(report.host, workers[report.host], facts.cores, facts.gpus)
    tell_warnings(problems)
    require(problems)

"""The last look before workers start on other hosts: nothing starts where something is wrong."""

from __future__ import annotations

from farandole.launch.hosts import HERE
from farandole.launch.messages import tell
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.host_check import JobFiles, Problem, crowding, facts_here, require
from farandole.launch.probes.survey import sessions, survey


def check_hosts(placement: Placement, files: JobFiles) -> None:
    """Raises `LaunchError` naming every host at fault; warnings are told.

    No process of it is left on any host. Only other hosts are asked.
    """
    problems = list(_crowded_here(placement, files))
    if placement.others:
        with sessions(placement.others, placement.ssh) as probes:
            reports = survey(probes, files, placement.interfaces)
        workers = {host.name: len(host.ranks) for host in placement.topology.hosts}
        for report in reports:
            problems += report.problems
            if report.facts is not None:
                facts = report.facts
                problems += crowding(report.host, workers[report.host], facts.cores, facts.gpus)
    for problem in problems:
        if problem.severity == "warning":
            tell(f"warning: {problem}")
    require(problems)


def _crowded_here(placement: Placement, files: JobFiles) -> list[Problem]:
    here = [host for host in placement.topology.hosts if host.name == HERE]
    if not here:
        return []
    facts = facts_here(JobFiles(files.folder))
    return crowding(HERE, len(here[0].ranks), facts.cores, facts.gpus)

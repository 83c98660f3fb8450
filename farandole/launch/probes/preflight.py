"""The last look before workers start on other hosts: nothing starts where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from farandole.launch.hosts import HERE
from farandole.launch.messages import tell
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.host_check import JobFiles, Problem, crowding, facts_here, require
from farandole.launch.probes.session import ProbeSession
from farandole.launch.probes.survey import sessions, survey


def check_hosts(placement: Placement, files: JobFiles) -> None:
    """Raises `LaunchError` naming every host at fault; warnings are told.

    No process of it is left on any host. Only other hosts are asked.
    """
    require([*_crowded_here(placement, files), *host_errors(placement, files)])


def host_errors(
    placement: Placement,
    files: JobFiles,
    on_open: Callable[[Iterable[ProbeSession]], None] | None = None,
) -> list[Problem]:
    """What is wrong with the other hosts; warnings are told.

    `on_open` gets the probes, so that another thread can give them up.
    """
    problems: list[Problem] = []
    if placement.others:
        with sessions(placement.others, placement.ssh) as probes:
            if on_open is not None:
                on_open(probes.values())
            reports = survey(probes, files, placement.interfaces)
        workers = {host.name: len(host.ranks) for host in placement.topology.hosts}
        for report in reports:
            problems += report.problems
            if report.facts is not None:
                facts = report.facts
                problems += crowding(report.host, workers[report.host], facts.cores, facts.gpus)
    return _without_warnings(problems)


def _without_warnings(problems: Iterable[Problem]) -> list[Problem]:
    """Tells them."""
    errors = []
    for problem in problems:
        if problem.severity == "warning":
            tell(f"warning: {problem}")
        else:
            errors.append(problem)
    return errors


def _crowded_here(placement: Placement, files: JobFiles) -> list[Problem]:
    here = [host for host in placement.topology.hosts if host.name == HERE]
    if not here:
        return []
    facts = facts_here(JobFiles(files.folder))
    return _without_warnings(crowding(HERE, len(here[0].ranks), facts.cores, facts.gpus))

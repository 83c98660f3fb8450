"""A look at hosts without starting anything there: those of a race, whose first lane may leave out
some of them, and those of an elastic job, which come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from farandole.launch.host_facts import JobFiles
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.crowding import crowding, warn_if_crowded
from farandole.launch.probes.problems import Problem, errors_among, require, tell_warnings
from farandole.launch.probes.session import ProbeSession
from farandole.launch.probes.survey import sessions, survey


def check_hosts(placement: Placement, files: JobFiles) -> None:
    """Raises `LaunchError` naming every host at fault; warnings are told.

    No process of it is left on any host. Only other hosts are asked.
    """
    placement.tell_note()
    warn_if_crowded(placement.workers_here)
    require(host_errors(placement, files))


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
        with sessions(placement.others, placement.channel) as probes:
            if on_open is not None:
                on_open(probes.values())
            reports = survey(probes, files, placement.channel, placement.interfaces)
        workers = {host.name: len(host.ranks) for host in placement.topology.hosts}
        for report in reports:
            problems += report.problems
            if (facts := report.facts) is not None:
                problems += crowding(report.host, workers[report.host], facts.cores, facts.gpus)
    tell_warnings(problems)
    return errors_among(problems)

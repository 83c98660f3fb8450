"""Looks at every host of a job, and at the link between every two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from farandole.launch.host_facts import HostFacts, JobFiles
from farandole.launch.hosts import HERE
from farandole.launch.placement.placement import Placement
from farandole.launch.probes.crowding import crowding
from farandole.launch.probes.link_test import LinkFigures
from farandole.launch.probes.own_address import own_address
from farandole.launch.probes.problems import Problem
from farandole.launch.probes.session import ProbeError, ProbeSession
from farandole.launch.probes.survey import HostReport, at_once, sessions, survey
from farandole.worker.store.address import new_token

Pair = tuple[str, str]


@dataclass(frozen=True)
class HostsExamination:
    """`links` has the figures of each pair of hosts: `to` is from the second to the first."""

    reports: tuple[HostReport, ...]
    links: Mapping[Pair, LinkFigures]
    problems: tuple[Problem, ...]

    @property
    def is_broken(self) -> bool:
        return any(problem.severity == "error" for problem in self.problems)

    def figures(self, sender: str, receiver: str) -> tuple[float, float] | None:
        """Seconds for a message, and bytes a second, in this direction; None: not measured."""
        for pair, found in self.links.items():
            rates = {pair: found.back_bytes_per_second, pair[::-1]: found.to_bytes_per_second}
            rate = rates.get((sender, receiver))
            if rate is not None:
                return found.latency_seconds, rate
        return None

    def as_json(self) -> dict[str, Any]:
        names = [report.host for report in self.reports]
        directions = ((a, b, self.figures(a, b)) for a in names for b in names if a != b)
        return {
            "ok": not self.is_broken,
            "hosts": [
                {
                    "host": report.host,
                    "facts": None if report.facts is None else _as_json(report.facts),
                    "clock_offset_seconds": report.clock_offset_seconds,
                }
                for report in self.reports
            ],
            "links": [
                {"from": a, "to": b, "latency_seconds": f[0], "bytes_per_second": f[1]}
                for a, b, f in directions
                if f is not None
            ],
            "problems": [asdict(problem) for problem in self.problems],
        }


def _as_json(facts: HostFacts) -> dict[str, Any]:
    """Without its clock, of which the offset says more, and what `problems` has anyway."""
    left_out = ("clock_seconds", "no_way_back")
    return {name: value for name, value in asdict(facts).items() if name not in left_out}


def examine_hosts(placement: Placement, files: JobFiles) -> HostsExamination:
    """Asks all hosts at once, then tests the links. Leaves no process on any host."""
    names = [host.name for host in placement.topology.hosts]
    workers = {host.name: len(host.ranks) for host in placement.topology.hosts}
    with sessions(names, placement.channel) as probes:
        reports = survey(probes, files, placement.channel, placement.interfaces)
        problems = [problem for report in reports for problem in report.problems]
        for report in reports:
            if (facts := report.facts) is not None:
                problems += crowding(report.host, workers[report.host], facts.cores, facts.gpus)
        answering = [probes[report.host] for report in reports if report.facts is not None]
        links, failed = measure_links(answering, placement)
    return HostsExamination(tuple(reports), links, (*problems, *failed))


def measure_links(
    probes: Sequence[ProbeSession], placement: Placement
) -> tuple[dict[Pair, LinkFigures], list[Problem]]:
    """All pairs, those without a host in common at the same time."""
    others = [probe.host for probe in probes if probe.host != HERE]
    launcher, _ = own_address(placement.channel, others, placement.interfaces)
    links: dict[Pair, LinkFigures] = {}
    problems: list[Problem] = []
    if launcher is None:
        return links, problems
    by_host = {probe.host: probe for probe in probes}

    def test(pair: Pair) -> LinkFigures | Problem:
        listening, connecting = (by_host[host] for host in pair)
        token = new_token()
        try:
            there = listening.listen(launcher, placement.interfaces, token)
            return connecting.measure(there, token, bandwidth=True)
        except ProbeError as error:
            what = f"the link between it and {listening.host}"
            text = f"{what} could not be tested: {error.problem.text}"
            return Problem(
                connecting.host,
                "error",
                text,
                "Let them connect to each other (firewall), or name the interface that the hosts "
                "share: --network-interfaces eth0",
            )

    for turn in rounds(list(by_host)):
        for pair, found in zip(turn, at_once(test, turn, probes), strict=True):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                links[pair] = found
    return links, problems


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, in turns in which no host is in two pairs: they would share its link."""
    left = list(combinations(hosts, 2))
    turns: list[list[Pair]] = []
    while left:
        turn: list[Pair] = []
        busy: set[str] = set()
        for pair in left:
            if busy.isdisjoint(pair):
                turn.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in turn]
        turns.append(turn)
    return turns

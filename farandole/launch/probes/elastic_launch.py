"""Runs an elastic job where a `Placement` says, on hosts that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from farandole.environment import STARTED
from farandole.launch.host_facts import JobFiles
from farandole.launch.hosts import HERE
from farandole.launch.job import Outcome
from farandole.launch.launcher import launch_elastic
from farandole.launch.placement.placement import HostOptions, Placement
from farandole.launch.placement.roster import HostRoster
from farandole.launch.policies.elastic.job import ElasticJob
from farandole.launch.probes.admission import HostAdmission
from farandole.launch.probes.preflight import check_hosts, host_errors
from farandole.launch.probes.session import ProbeSession
from farandole.topology import Host, Topology


def launch_elastic_placed(
    job: ElasticJob, placement: Placement, options: HostOptions, *, script: str | None = None
) -> Outcome:
    """Runs `job` on the hosts of `placement`, whose description is read again while it runs.

    Raises `LaunchError`, before any worker starts, naming each host that cannot take part. A host
    that is added later is looked at in the same way; one that cannot take part is named and left
    out.
    """
    roster = HostRoster(options, placement.entries, placement.channel)
    files = JobFiles(str(Path.cwd()), script)
    slots = roster.slots()
    check_hosts(
        replace(placement, topology=_topology(slots.items()), channel=roster.channel), files
    )

    def look(
        host: str, count: int, on_open: Callable[[Iterable[ProbeSession]], None]
    ) -> Sequence[str]:
        one = Placement(_topology([(host, count)]), roster.channel, placement.interfaces)
        return [str(problem) for problem in host_errors(one, files, on_open)]

    admission = HostAdmission(look, slots)
    job = replace(
        job,
        discover=lambda: admission.admitted(roster.slots()),
        channel=roster.channel,
        interfaces=placement.interfaces,
        admission=admission,
    )
    try:
        return launch_elastic(_without_terminal(job, slots))
    finally:
        admission.stop()


def _topology(slots: Iterable[tuple[str, int]]) -> Topology:
    hosts, first = [], 0
    for host, count in slots:
        hosts.append(Host(host, tuple(range(first, first + count))))
        first += count
    return Topology(tuple(hosts))


def _without_terminal(job: ElasticJob, slots: Iterable[str]) -> ElasticJob:
    """Any worker may be rank 0: nobody on another host can read this host's clock."""
    others = [host for host in slots if host != HERE]
    if job.training is None or not others:
        return job
    base = job.training.base
    base = replace(base, environment={**base.environment, STARTED: ""})
    return replace(job, training=replace(job.training, base=base))

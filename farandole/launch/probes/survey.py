"""Asks all hosts at once what they are, and compares what they say with this host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from farandole.launch.backends.remote.channel import Channel
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host
from farandole.launch.hosts import HERE
from farandole.launch.probes.host_check import compare
from farandole.launch.probes.link_test import LinkFigures, Listener
from farandole.launch.probes.own_address import own_address
from farandole.launch.probes.problems import Problem
from farandole.launch.probes.session import Address, ProbeError, ProbeSession
from farandole.worker.store.address import new_token

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class HostReport:
    """What one host said. None: it could not be asked; then a problem says why."""

    host: str
    facts: HostFacts | None = None
    clock_offset_seconds: float | None = None
    to_launcher: LinkFigures | None = None
    problems: tuple[Problem, ...] = ()


@contextmanager
def sessions(hosts: Sequence[str], channel: Channel) -> Iterator[dict[str, ProbeSession]]:
    """A probe on each host. All have ended at the end, whatever happens."""
    with ExitStack() as stack:
        yield {host: stack.enter_context(ProbeSession(host, channel)) for host in hosts}


def survey(
    probes: Mapping[str, ProbeSession],
    files: JobFiles,
    channel: Channel,
    interfaces: Sequence[str],
) -> list[HostReport]:
    """What all hosts say, in their order. They are asked at the same time."""
    here, token = facts_of_this_host(files), new_token()
    others = [host for host in probes if host != HERE]
    address, unknown = own_address(channel, others, interfaces)
    with ExitStack() as stack:
        at = None
        if address is not None:
            listener = stack.enter_context(Listener(address, token))
            at = Address(listener.address, listener.port)

        def ask(probe: ProbeSession) -> HostReport:
            found = _report(probe, files, here, None if probe.host == HERE else at, token)
            if found.facts is None or probe.host not in unknown:
                return found  # the channel knows no way either, and says why; or all is well
            return replace(found, problems=(unknown[probe.host], *found.problems))

        return at_once(ask, list(probes.values()), probes.values())


def at_once(ask: Callable[[T], U], items: Sequence[T], probes: Collection[ProbeSession]) -> list[U]:
    """`ask` for all items at the same time. `probes` are those that it talks to.

    What is raised for one is raised here, when all have ended. When this is interrupted, the
    connections are given up, so that nobody waits for an answer any more.
    """
    with ThreadPoolExecutor(max_workers=max(len(items), 1)) as pool:
        try:
            return list(pool.map(ask, items))
        except BaseException:
            for probe in probes:
                probe.kill()
            raise


def _report(
    probe: ProbeSession, files: JobFiles, here: HostFacts, launcher: Address | None, token: bytes
) -> HostReport:
    host = probe.host
    try:
        facts = probe.facts(files)
        offset = probe.clock_offset_seconds()
    except ProbeError as error:
        return HostReport(host, problems=(error.problem,))
    reached = None
    if launcher is not None:
        try:
            reached = probe.measure(launcher, token, bandwidth=False)
        except ProbeError as error:
            where = f"{launcher.address}:{launcher.port}"
            facts = replace(facts, no_way_back=f"{where}: {error.problem.text}")
    problems = compare(host, facts, here, files, offset)
    return HostReport(host, facts, offset, reached, tuple(problems))

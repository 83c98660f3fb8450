"""Asks all hosts at once what they are, and compares what they say with this host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from farandole.errors import UserError
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.hosts import HERE
from farandole.launch.probes.host_check import HostFacts, JobFiles, Problem, compare, facts_here
from farandole.launch.probes.link_test import LinkFigures, Listener
from farandole.launch.probes.session import Address, ProbeError, ProbeSession
from farandole.worker.network import address_for
from farandole.worker.store.address import new_token

T = TypeVar("T")
U = TypeVar("U")
_OPEN_PORTS = (
    "Let it connect to this host (firewall), or name the interface that the hosts share: "
    "--network-interfaces eth0"
)


@dataclass(frozen=True)
class HostReport:
    """What one host said. None: it could not be asked; then a problem says why."""

    host: str
    facts: HostFacts | None = None
    clock_offset_seconds: float | None = None
    to_launcher: LinkFigures | None = None
    problems: tuple[Problem, ...] = ()


@contextmanager
def sessions(hosts: Sequence[str], ssh: Ssh) -> Iterator[dict[str, ProbeSession]]:
    """A probe on each host. All have ended at the end, whatever happens."""
    with ExitStack() as stack:
        yield {host: stack.enter_context(ProbeSession(host, ssh)) for host in hosts}


def survey(
    probes: Mapping[str, ProbeSession], files: JobFiles, interfaces: Sequence[str]
) -> list[HostReport]:
    """What all hosts say, in their order. They are asked at the same time."""
    here, token = facts_here(files), new_token()
    others = [host for host in probes if host != HERE]
    address, unknown = reachable_address(others, interfaces)
    with ExitStack() as stack:
        at = None
        if address is not None:
            listener = stack.enter_context(Listener(address, token))
            at = Address(listener.address, listener.port)

        def ask(probe: ProbeSession) -> HostReport:
            found = _report(probe, files, here, None if probe.host == HERE else at, token)
            if found.facts is None:  # ssh knows no way either, and says why
                return found
            return replace(found, problems=(*unknown.get(probe.host, ()), *found.problems))

        return at_once(ask, list(probes.values()), probes.values())


def reachable_address(
    others: Sequence[str], interfaces: Sequence[str]
) -> tuple[str | None, dict[str, tuple[Problem, ...]]]:
    """Where the others reach this host, and the problems of those to which no way leads."""
    address: str | None = None
    problems: dict[str, tuple[Problem, ...]] = {}
    for host in others:
        try:
            found = address_for([host], interfaces)
        except UserError as error:
            problems[host] = (Problem(host, "error", str(error), ""),)
        else:
            address = address or found
    return address, problems


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
        return HostReport(host, problems=(Problem(host, "error", error.text, error.advice),))
    problems = compare(host, facts, here, files, offset)
    reached = None
    if launcher is not None:
        try:
            reached = probe.measure(launcher, token, bandwidth=False)
        except ProbeError as error:
            where = f"{launcher.address}:{launcher.port}"
            text = f"it cannot connect to this host at {where}: {error.text}"
            problems.append(Problem(host, "error", text, _OPEN_PORTS))
    return HostReport(host, facts, offset, reached, tuple(problems))

"""Hosts that are looked at when they are added, and again when they were lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from farandole.launch.probes.admission import HostAdmission


class Looks:
    """What each look at a host finds, in turn."""

    def __init__(self, *found: list[str]) -> None:
        self.found = list(found)
        self.hosts: list[str] = []
        self.may_end = threading.Event()

    def look(self, host: str, slots: int, on_open: Callable[..., None]) -> Sequence[str]:
        self.hosts.append(host)
        on_open([])
        assert self.may_end.wait(100)
        return self.found.pop(0)


@pytest.fixture
def looks() -> Iterator[Looks]:
    found = Looks(["host b: its clock is wrong."], ["host b: its clock is wrong."], [], [])
    yield found
    found.may_end.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_is_looked_at_until_it_is_fit(
    looks: Looks, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = {"localhost": 1, "a": 2, "b": 2}
    admission = HostAdmission(looks.look, ["localhost", "a"])
    assert admission.admitted(hosts) == {"localhost": 1, "a": 2}
    assert admission.admitted(hosts) == {"localhost": 1, "a": 2}
    assert looks.hosts == ["b"]  # one look at a time
    looks.may_end.set()
    until(lambda: admission.admitted(hosts) == hosts)
    assert looks.hosts == ["b"] * 3
    said = capfd.readouterr().err
    assert said.count("host b: its clock is wrong.\nHost b is left out") == 1

    assert admission.lost("b") == "; b is left out until it answers again"
    assert not admission.is_fit("b")
    assert admission.admitted(hosts) == hosts  # its workers, if there are any, stay
    until(lambda: bool(admission.admitted(hosts)) and admission.is_fit("b"))
    assert "host b answers again" in capfd.readouterr().err
    admission.stop()


def test_the_end_of_the_job_is_not_held_up(looks: Looks) -> None:
    killed: list[str] = []

    class Probe:
        def kill(self) -> None:
            killed.append("b")
            looks.may_end.set()

    def look(host: str, slots: int, on_open: Callable[..., None]) -> Sequence[str]:
        on_open([Probe()])
        return looks.look(host, slots, lambda probes: None)

    admission = HostAdmission(look, [])
    admission.admitted({"b": 1})
    until(lambda: looks.hosts == ["b"])
    admission.stop()
    assert killed == ["b"]
    assert not any(thread.name == "look at b" for thread in threading.enumerate())

"""Which hosts are left out."""

from __future__ import annotations

from farandole.launch.policies.elastic.host_blocklist import HostBlocklist, Incident

HOSTS = {"a": 2, "b": 1}


def test_the_third_incident_is_one_too_many() -> None:
    strikes = HostBlocklist()
    assert not strikes.note("a", Incident(0))
    assert not strikes.note("a", Incident(0))  # died together with the one before
    assert not strikes.note("a", Incident(1))
    assert strikes.usable(HOSTS) == HOSTS
    assert strikes.note("a", Incident(1, 4))
    assert not strikes.note("a", Incident(1, 5))  # it is out already
    assert strikes.usable(HOSTS) == {"b": 1}


def test_a_commit_forgives_what_was_before_its_generation() -> None:
    strikes = HostBlocklist()
    strikes.note("a", Incident(0))
    strikes.note("a", Incident(1))
    strikes.forgive(1)  # of the incidents only that of generation 1 is left
    assert not strikes.note("a", Incident(1, 7))
    strikes.forgive(1)
    assert strikes.note("a", Incident(1, 8))
    strikes.forgive(9)  # too late
    assert strikes.usable(HOSTS) == {"b": 1}


def test_a_host_that_goes_and_comes_back_gets_another_chance() -> None:
    strikes = HostBlocklist()
    for generation in range(3):
        strikes.note("a", Incident(generation))
    assert strikes.usable({"b": 1}) == {"b": 1}
    assert strikes.usable(HOSTS) == HOSTS


def test_after_a_pause_one_failure_is_enough() -> None:
    blocklist = HostBlocklist(60.0)
    for generation in range(3):
        left_out = blocklist.note("a", Incident(generation), now=100.0)
    assert left_out
    assert blocklist.pause_seconds("a") == 60.0
    assert blocklist.is_left_out("a", now=159.0)
    assert not blocklist.is_left_out("a", now=161.0)
    assert blocklist.note("a", Incident(9), now=161.0)
    assert blocklist.is_left_out("a", now=280.0)
    assert blocklist.pause_seconds("a") == 120.0

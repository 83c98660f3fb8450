"""When messages over simulated links leave and arrive, by a clock that the tests set."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.comm.transports.simulated.link_clock import LinkClock, Transit
from farandole.errors import UserError
from farandole.network_link import NetworkLink

BURST_SECONDS = 0.001
LINK = NetworkLink.read("80mbit,2ms")  # 10 MB/s
LONG = 1448 * 1000
LONG_SECONDS = 1514 * 1000 / 10e6
NOW = 1000.0


@pytest.fixture
def clock(tmp_path: Path) -> LinkClock:
    return LinkClock(tmp_path / "link", 3, LINK)


def expect(transit: Transit, left: float, arrives: float) -> None:
    assert transit.left == pytest.approx(left, abs=1e-9)
    assert transit.arrives == pytest.approx(arrives, abs=1e-9)


def test_a_message_takes_its_bytes_and_the_delay(clock: LinkClock) -> None:
    left = NOW + LONG_SECONDS - BURST_SECONDS
    expect(clock.book(LONG, 0, 1, at=NOW), left, left + 0.002)


def test_messages_of_a_host_share_its_rate_whoever_they_are_for(clock: LinkClock) -> None:
    first = clock.book(LONG, 0, 1, at=NOW)
    second = clock.book(LONG, 0, 2, at=NOW)
    expect(second, first.left + LONG_SECONDS, first.arrives + LONG_SECONDS)


def test_messages_to_a_host_share_its_rate_whoever_sends_them(clock: LinkClock) -> None:
    first = clock.book(LONG, 0, 2, at=NOW)
    second = clock.book(LONG, 1, 2, at=NOW)
    expect(second, first.left, first.arrives + LONG_SECONDS)


def test_the_two_directions_of_a_link_do_not_share(clock: LinkClock) -> None:
    there, back = clock.book(LONG, 0, 1, at=NOW), clock.book(LONG, 1, 0, at=NOW)
    assert there == back


def test_all_processes_see_the_same_links(clock: LinkClock, tmp_path: Path) -> None:
    first = clock.book(LONG, 0, 1, at=NOW)
    other = LinkClock(tmp_path / "link", 3, LINK)
    expect(other.book(LONG, 0, 1, at=NOW), first.left + LONG_SECONDS, first.arrives + LONG_SECONDS)


def test_a_short_message_passes_between_the_frames_of_long_ones(clock: LinkClock) -> None:
    long = clock.book(LONG, 0, 1, at=NOW)
    short = clock.book(1448, 0, 1, at=NOW)
    expect(short, NOW + 1514 / 10e6, NOW + 1514 / 10e6 + 0.002)
    third = clock.book(LONG, 0, 1, at=NOW)  # and yet its bytes count
    expect(third, long.left + 1514 / 10e6 + LONG_SECONDS, third.left + 0.002)


def test_after_a_pause_the_link_is_free(clock: LinkClock) -> None:
    clock.book(LONG, 0, 1, at=NOW)
    later = NOW + 10
    left = later + LONG_SECONDS - BURST_SECONDS
    expect(clock.book(LONG, 0, 1, at=later), left, left + 0.002)


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbit,", "200mbit,1ms,2ms", "1ms,200mbit"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"such as"):
        NetworkLink.read(text)


def test_how_a_link_is_written() -> None:
    assert str(NetworkLink.read("200Mbit,1ms")) == "200 Mbit/s, 1 ms"
    assert str(NetworkLink.read("2.5gbit")) == "2.5 Gbit/s"

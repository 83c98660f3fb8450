"""α and β: measured between two ranks, the same on all, remembered, and overridable."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm import Exchange, InProcess, Op, calibration
from farandole.comm.calibration import (
    CostCache,
    Costs,
    Unmeasured,
    cache_folder,
    calibrate,
    link_between,
    measure,
    parse_link,
)
from farandole.comm.transports.base import TYPICAL_LINK
from farandole.comm.transports.messages import Message
from farandole.errors import UserError
from farandole.schedule import Link
from farandole.topology import Topology

COSTS = Costs(Link(1e-4, 1e-9), ((4096, True), (65536, False)))
HOSTS = Topology.from_names(["a", "a", "b", "b"])


class Clock(threading.local):
    """Each rank's own; it stands still but for messages."""

    now = 0.0


class Slow(InProcess):
    """Messages take a known time, by a clock that is made for it."""

    clock = Clock()
    seconds_per_message = 0.002
    seconds_per_byte = 2e-8

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for _, into in receives:
            self.clock.now += self.seconds_per_message + into.nbytes * self.seconds_per_byte
        super().exchange(sends, receives)


class Hidden(Slow):
    """Noise hides what a byte costs: a large message is even a little sooner there."""

    seconds_per_byte = -1e-12


class Far(Slow):
    """So slow that there is no time to try a large message."""

    seconds_per_message = 3.0


@pytest.fixture(autouse=True)
def made_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "perf_counter", lambda: Slow.clock.now)


def on_ranks(
    size: int,
    body: Callable[[InProcess], Any],
    kind: type[InProcess] = Slow,
    hosts: Topology | None = None,
) -> list[Any]:
    exchange = Exchange(size)
    results: dict[int, Any] = {}

    def work(rank: int) -> None:
        results[rank] = body(kind(exchange, rank, hosts or (HOSTS if size == 4 else None)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def test_what_is_measured_is_what_it_takes_and_the_same_for_all() -> None:
    links = on_ranks(3, lambda transport: measure(transport, 0, 2))
    assert links[0] == links[1] == links[2]
    assert links[0].seconds_per_message == pytest.approx(0.002, rel=0.01)
    assert links[0].seconds_per_byte == pytest.approx(2e-8, rel=0.01)


def calibrated(environ: Mapping[str, str], folder: Path) -> Callable[[InProcess], Costs]:
    def body(transport: InProcess) -> Costs:
        calibrate(transport, environ if transport.rank == 0 else {}, folder)
        return Costs(transport.link, transport.native_wins)

    return body


@pytest.mark.parametrize(
    ("seconds_per_message", "seconds_per_byte"),
    [(0.06, 2e-8), (0.002, 1e-9), (1e-6, 1e-10), (5e-4, 1e-10), (0.001, 1e-5)],
)
def test_every_link_that_can_be_is_measured_right(
    monkeypatch: pytest.MonkeyPatch, seconds_per_message: float, seconds_per_byte: float
) -> None:
    monkeypatch.setattr(Slow, "seconds_per_message", seconds_per_message)
    monkeypatch.setattr(Slow, "seconds_per_byte", seconds_per_byte)
    (link, _) = on_ranks(2, lambda transport: measure(transport, 0, 1))
    assert link.seconds_per_byte == pytest.approx(seconds_per_byte, rel=0.01)
    message = seconds_per_message + 64 * seconds_per_byte
    assert link.seconds_per_message == pytest.approx(message, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "largest", "told"),
    [
        (Hidden, 2**24, "16,777,216 bytes took 1.98 ms and 64 bytes 2 ms, too close"),
        (Far, 2**16, "65,536 bytes took 3e+03 ms and 64 bytes 3e+03 ms, too close"),
    ],
)
def test_what_could_not_be_measured_is_not_made_up(
    tmp_path: Path, kind: type[Slow], largest: int, told: str
) -> None:
    found = on_ranks(3, lambda transport: measure(transport, 0, 2), kind)
    assert found[0] == found[1] == found[2]
    assert isinstance(found[0], Unmeasured)
    assert found[0].largest_bytes == largest
    assert told in found[0].reason
    # `auto` goes by what links usually cost, and the next job measures again.
    usual = on_ranks(4, calibrated({}, tmp_path), kind)
    assert {costs.link for costs in usual} == {TYPICAL_LINK}
    assert list(tmp_path.iterdir()) == []
    assert set(on_ranks(2, lambda each: link_between(each, 0, 1), kind)) == {TYPICAL_LINK}


def test_what_earlier_versions_kept_is_measured_again(tmp_path: Path) -> None:
    old = {"k": {"alpha": 1e-4, "beta": 1e-12, "measured": time.time()}}
    (tmp_path / "links.json").write_text(json.dumps(old))
    assert CostCache(tmp_path, "k").read() is None


def test_it_is_measured_once_and_then_remembered(tmp_path: Path) -> None:
    first = on_ranks(4, calibrated({}, tmp_path))
    again = on_ranks(4, calibrated({}, tmp_path))
    assert set(first) == set(again) == {first[0]}
    (entry,) = json.loads((tmp_path / "links.json").read_text())
    assert entry == f"in-process {HOSTS}"


def test_emulated_hosts_are_measured_anew(tmp_path: Path) -> None:
    """The same names stand for another link the next time."""
    hosts = Topology.from_names(["emulated-0", "emulated-0", "emulated-1", "here"])
    on_ranks(4, calibrated({}, tmp_path), hosts=hosts)
    assert list(tmp_path.iterdir()) == []
    CostCache(tmp_path, f"in-process {hosts}").write(COSTS)  # by another version
    found = on_ranks(4, calibrated({}, tmp_path), hosts=hosts)
    assert set(found) == {found[0]}
    assert found[0].link.seconds_per_byte == pytest.approx(2e-8, rel=0.01)


def test_rank_0s_word_overrides_the_measurement(tmp_path: Path) -> None:
    found = on_ranks(4, calibrated({"FARANDOLE_LINK": "0.5,1e-6"}, tmp_path))
    assert set(found) == {Costs(Link(0.5, 1e-6), ())}
    assert list(tmp_path.iterdir()) == []


class Mixed(Slow):
    """Its own all-reduce is quick for short vectors, and slow for long ones on one of the ranks."""

    native_is_fastest = False

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        slow = self.rank == 1 and flat.nbytes > 2**16
        self.clock.now += 10.0 if slow else 0.0
        super().native_all_reduce(flat, op, claim)


def test_the_transports_own_is_tried_and_all_ranks_know_where_it_wins(tmp_path: Path) -> None:
    found = on_ranks(4, calibrated({}, tmp_path), Mixed)
    assert set(found) == {found[0]}
    # Not tried further: on the slowest rank it has taken long enough.
    assert found[0].native_wins == ((2**12, True), (2**16, True), (2**20, False))
    assert set(on_ranks(4, calibrated({}, tmp_path), Mixed)) == {found[0]}  # as it was kept


@pytest.mark.parametrize("text", ["", "1", "fast,slow", "1,2,3", "-1,1e-9", "0.1,0", "nan,1e-9"])
def test_a_link_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match="seconds per message and seconds per byte, such as"):
        parse_link(text)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "no json", '{"k": 3}', '{"k": {"alpha": "x", "beta": 1, "measured": 9e9}}'],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "links.json").write_text(content)
    kept = CostCache(tmp_path, "k")
    assert kept.read() is None
    kept.write(COSTS)
    assert kept.read() == COSTS


def test_what_is_old_is_measured_again(tmp_path: Path) -> None:
    entry = {"alpha": 1e-4, "beta": 1e-9, "native_wins": [], "measured": time.time()}
    (tmp_path / "links.json").write_text(json.dumps({"k": entry}))
    assert CostCache(tmp_path, "k").read() == Costs(COSTS.link, ())
    for hours, is_read in ((20, True), (25, False)):
        entry["measured"] = time.time() - hours * 3600
        (tmp_path / "links.json").write_text(json.dumps({"k": entry}))
        kept = CostCache(tmp_path, "k")
        assert (kept.read() is not None) == is_read
        assert kept.age_seconds() == pytest.approx(hours * 3600, abs=900)
    assert CostCache(tmp_path, "another").age_seconds() is None


def test_what_an_earlier_version_kept_is_measured_again(tmp_path: Path) -> None:
    entry = {"alpha": 1e-4, "beta": 1e-9, "measured": time.time()}  # nobody had tried gloo's own
    (tmp_path / "links.json").write_text(json.dumps({"k": entry}))
    assert CostCache(tmp_path, "k").read() is None


def test_a_folder_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostCache(tmp_path / "file" / "below", "k").write(COSTS)
    assert CostCache(tmp_path / "file" / "below", "k").read() is None


def test_where_it_is_kept() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/farandole")
    assert cache_folder({}) == Path.home() / ".cache" / "farandole"

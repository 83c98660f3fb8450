"""Spans: what a group tells, what a recorder keeps, and on which clock."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from farandole.comm import Exchange, Group, InProcess
from farandole.comm.meter import GradientWait, Meter, ring_bytes
from farandole.topology import Topology
from farandole.trace import recorder
from farandole.trace.chrome import HostClock, TraceFile, read_part
from farandole.trace.clock import best_of, offset_over_group, offset_over_store
from farandole.trace.recorder import Recorder
from farandole.trace.spans import NO_TRACE

HEADER = {"rank": 3, "size": 4, "host": "here", "pid": 17}
TWO_HOSTS = Topology.from_names(["left", "left", "right", "right"])


def part_of(path: Path) -> TraceFile:
    part = read_part(path)
    assert part is not None
    assert (part.rank, part.size, part.host, part.pid, part.damaged_lines) == (3, 4, "here", 17, 0)
    return part


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        results[index] = bodies[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=150)
    return [results[index] for index in range(len(bodies))]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written unless the test says so."""
    monkeypatch.setattr(recorder, "_FLUSH_SECONDS", 3600.0)


# Off


def test_no_trace_is_one_object_that_does_nothing() -> None:
    first = NO_TRACE.span("all_reduce", "comm", bytes=8)
    assert first is NO_TRACE.span("forward", "compute")
    with first, first:  # again, and inside itself
        pass
    with pytest.raises(KeyError, match="mine"), first:
        raise KeyError("mine")


# On


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    programs=st.lists(
        st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=8),
        min_size=1,
        max_size=4,
    )
)
def test_every_span_is_kept_once_and_inside_the_one_around_it(
    tmp_path: Path, programs: list[Any]
) -> None:
    """A program is a tree of spans; each runs on a thread of its own, all at once."""
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    expected: list[tuple[str, str]] = []

    def play(tree: Any, name: str) -> None:
        expected.append((name, name.rpartition(".")[0]))
        with kept.span(name, "compute", depth=name.count(".")):
            for index, inner in enumerate(tree):
                play(inner, f"{name}.{index}")

    bodies = [lambda i=i, tree=tree: play(tree, str(i)) for i, tree in enumerate(programs)]
    in_threads(*bodies)
    kept.close()
    part = part_of(kept.path)
    assert part.ended
    assert not part.open
    found = {name: (begin, end, row) for name, _, begin, end, row, _ in part.spans}
    assert len(part.spans) == len(expected)
    assert found.keys() == {name for name, _ in expected}
    for name, parent in expected:
        begin, end, row = found[name]
        assert begin <= end
        assert 1 <= row <= len(part.threads)
        if parent:
            assert found[parent][0] <= begin
            assert end <= found[parent][1]
            assert row == found[parent][2]
    assert all(details == {"depth": name.count(".")} for name, *_, details in part.spans)
    tops = [found[str(index)][2] for index in range(len(programs))]
    assert len(set(tops)) == len(tops), "each thread has a row of its own"


def test_rows_are_named_after_their_threads(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "part.jsonl", HEADER)

    def tell() -> None:
        with kept.span("all_reduce", "comm"):
            pass

    for _ in range(2):
        thread = threading.Thread(target=tell, name="comm")
        thread.start()
        thread.join()
    tell()
    kept.close()
    part = part_of(kept.path)
    assert part.threads == ["main", "comm", "comm 2"]
    assert [span[4] for span in part.spans] == [2, 3, 1]


def test_spans_that_overlap_get_rows_of_their_own_and_give_them_back(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    first, second, third = (kept.span(f"bucket {i}", "gradients", bytes=i) for i in range(3))
    first.__enter__()
    second.__enter__()
    in_threads(lambda: first.__exit__(None, None, None))  # on another thread than it began
    third.__enter__()
    in_threads(lambda: second.__exit__(None, None, None))
    third.__exit__(None, None, None)
    kept.close()
    part = part_of(kept.path)
    assert part.threads == ["main", "gradients", "gradients 2"]
    assert [(name, row) for name, _, _, _, row, _ in part.spans] == [
        ("bucket 0", 2), ("bucket 1", 3), ("bucket 2", 2),
    ]  # fmt: skip


def test_what_is_under_way_is_known_when_the_process_is_killed(
    tmp_path: Path, by_hand: None
) -> None:
    """The file as it lies there at that moment: what was flushed, and no more."""
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    with kept.span("save", "checkpoint"):
        with kept.span("broadcast", "comm", bytes=5):
            pass
        stuck = kept.span("barrier", "comm", bytes=0)
        stuck.__enter__()
        before = time.perf_counter_ns()
        kept.flush()
        after = time.perf_counter_ns()
        part = part_of(kept.path)
        stuck.__exit__(None, None, None)
    assert not part.ended
    assert [span[0] for span in part.spans] == ["broadcast"]
    assert [span[0] for span in part.open] == ["save", "barrier"]
    assert before <= part.open_at <= after
    told = list(part.all_spans())
    assert [(name, details.get("unfinished")) for name, *_, details in told] == [
        ("broadcast", None), ("save", True), ("barrier", True),
    ]  # fmt: skip
    assert [end for *_, end, _, _ in told[1:]] == [part.open_at] * 2
    kept.close()
    whole = part_of(kept.path)
    assert whole.ended
    assert sorted(span[0] for span in whole.spans) == ["barrier", "broadcast", "save"]
    assert not whole.open, "told as ended by now"


def test_half_a_line_costs_that_line(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    with kept.span("forward", "compute"):
        pass
    kept.close()
    with kept.path.open("a") as file:
        file.write('[["backward", "comp')
    part = read_part(kept.path)
    assert part is not None
    assert (len(part.spans), part.damaged_lines) == (1, 1)
    kept.path.write_text('{"rank": 3, "si')
    assert read_part(kept.path) is None


def test_it_is_written_without_being_asked(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    with kept.span("forward", "compute"):
        pass
    deadline = time.monotonic() + 150
    while not part_of(kept.path).spans:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.close()
    kept.close()  # does no harm


def test_a_disk_that_fills_up_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: None
) -> None:
    kept = Recorder(tmp_path / "part.jsonl", HEADER)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with kept.span("forward", "compute"):
        pass
    kept.flush()
    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        with kept.span("backward", "compute"):
            pass
        kept.flush()
    kept.close()
    assert kept.problem is not None
    assert kept.problem.errno == errno.ENOSPC
    assert [span[0] for span in part_of(kept.path).spans] == ["forward"]


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "nowhere" / "part.jsonl", HEADER)
    with pytest.raises(OSError, match="No space left"):
        Recorder(Path("/dev/full"), HEADER)


def test_a_disk_that_hangs_does_not_hang_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_PATIENCE_SECONDS", 0.05)
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    inside, released, write = threading.Event(), threading.Event(), os.write

    def hang(file: int, data: bytes) -> int:
        inside.set()
        released.wait(150)
        return write(file, data)

    monkeypatch.setattr(os, "write", hang)
    with kept.span("forward", "compute"):
        pass
    assert inside.wait(150)
    kept.close()
    assert isinstance(kept.problem, TimeoutError)
    released.set()
    kept._thread.join(150)


def test_memory_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: None
) -> None:
    monkeypatch.setattr(recorder, "_MOST_WAITING", 10)
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    for index in range(25):
        with kept.span(str(index), "compute"):
            pass
    kept.close()
    part = part_of(kept.path)
    assert [span[0] for span in part.spans] == [str(index) for index in range(10)]
    assert part.lost == 15


# What a group tells


def test_the_bytes_of_the_spans_are_those_of_the_meter(tmp_path: Path) -> None:
    size = 3
    exchange = Exchange(size)
    groups = [
        Group(
            InProcess(exchange, rank),
            trace=Recorder(tmp_path / f"{rank}.jsonl", {**HEADER, "rank": rank}),
        )
        for rank in range(size)
    ]

    def talk(group: Group) -> None:
        group.all_reduce(torch.ones(1000), algorithm="ring")
        group.all_reduce(torch.ones(7, dtype=torch.int64))
        group.start(group.all_reduce, torch.ones(50)).wait()
        group.reduce_scatter(torch.ones(9, 2))
        group.all_gather(torch.ones(2 + group.rank))
        group.broadcast(torch.ones(5), source=1)
        group.all_to_all([torch.ones(4, 2)] * size)
        group.barrier()
        if group.rank == 0:
            group.send(torch.ones(11), 2)
        if group.rank == 2:
            group.receive(torch.ones(11), 0)

    in_threads(*(lambda group=group: talk(group) for group in groups))
    for group in groups:
        assert isinstance(group.trace, Recorder)
        group.trace.close()
        part = read_part(group.trace.path)
        assert part is not None
        sent = 0
        for name, category, _, _, _, details in part.spans:
            count = details["bytes"]
            assert (category, details["by"]) == ("comm", "in-process")
            sent += {
                "all_reduce": ring_bytes(count, size),
                "reduce_scatter": count - count // size,  # of nine rows, three stay
                "all_gather": count * (size - 1),
                "broadcast": count if group.rank == 1 else 0,
                "all_to_all": count,
                "send to rank 2": count,
            }.get(name, 0)
        assert sent == group.meter.bytes_sent > 0
        reduced = [span for span in part.spans if span[0] == "all_reduce"]
        assert [span[5]["bytes"] for span in reduced] == [4000, 56, 200]
        assert reduced[0][5]["algorithm"] == "ring"
        assert all(span[5]["algorithm"] for span in reduced)
        assert part.threads[reduced[2][4] - 1] == "comm"


def test_a_collective_that_fails_has_a_span_too(tmp_path: Path) -> None:
    exchange = Exchange(2, timedelta(seconds=0.1))
    kept = Recorder(tmp_path / "part.jsonl", HEADER)
    with pytest.raises(Exception, match="did not answer"):
        Group(InProcess(exchange, 0), trace=kept).barrier()
    kept.close()
    assert [span[0] for span in part_of(kept.path).spans] == ["barrier"]


class Said:
    """A trace that remembers the order in which spans begin and end."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[None]:
        text = " ".join([name, category, *(f"{key}={value}" for key, value in details.items())])

        @contextmanager
        def told() -> Iterator[None]:
            self.events.append(("begin", text))
            yield
            self.events.append(("end", text))

        return told()


def test_buckets_from_ready_to_reduced_and_the_wait_for_the_last() -> None:
    said = Said()
    wait = GradientWait(Meter(), said)
    for _ in range(2):  # each backward pass counts afresh
        wait.begin(torch.zeros(4), is_last=False)
        wait.begin(torch.zeros(2), is_last=False)
        wait.end()
        wait.begin(torch.zeros(1), is_last=True)
        wait.end()
        wait.end()
        first, second, third = (f"bucket {i} gradients bytes={n}" for i, n in enumerate((16, 8, 4)))
        waited = "waiting for gradients wait"
        assert said.events == [
            ("begin", first), ("begin", second), ("end", first), ("begin", third),
            ("begin", waited), ("end", second), ("end", third), ("end", waited),
        ]  # fmt: skip
        said.events.clear()


# Clocks


@given(
    skew=st.integers(-(10**18), 10**18),
    trips=st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=10, max_size=10
    ),
)
def test_an_offset_is_wrong_by_no_more_than_it_says(
    skew: int, trips: list[tuple[int, int]]
) -> None:
    """Their clock is ours plus `skew`; a trip takes one time there and another back."""
    now = 10**15

    def ask(turn: int) -> int:
        nonlocal now
        there, back = trips[turn]
        now += there
        theirs = now + skew
        now += back
        return theirs

    offset = best_of(ask, lambda: now)
    assert abs(offset.offset_ns - skew) <= offset.error_ns
    quickest = min(there + back for there, back in trips)
    assert offset.error_ns == (quickest + 1) // 2


def test_hosts_learn_their_offset_over_the_group() -> None:
    exchange = Exchange(4)
    skews = {"left": 0, "right": -5_000_000_000}

    def measure(rank: int) -> Any:
        group = Group(InProcess(exchange, rank, TWO_HOSTS))
        skew = skews[TWO_HOSTS.host(rank).name]
        return offset_over_group(group, lambda: time.perf_counter_ns() + skew)

    found = in_threads(*(lambda rank=rank: measure(rank) for rank in range(4)))
    assert [offset is not None for offset in found] == [False, False, True, False]
    assert abs(found[2].offset_ns - 5_000_000_000) <= found[2].error_ns < 10**10


def test_and_over_a_store_at_the_end() -> None:
    store = HashStore()
    patience = timedelta(seconds=20)

    def measure(rank: int) -> Any:
        skew = 7_000_000 if rank == 2 else 0
        return offset_over_store(
            store, rank, TWO_HOSTS, patience, lambda: time.perf_counter_ns() + skew
        )

    found = in_threads(*(lambda rank=rank: measure(rank) for rank in range(4)))
    assert [offset is not None for offset in found] == [False, False, True, False]
    assert abs(found[2].offset_ns + 7_000_000) <= found[2].error_ns
    assert json.loads(json.dumps(found[2].as_line()))["clock"]["at"] == found[2].at


@pytest.mark.parametrize("rank", [0, 2])
def test_nobody_waits_for_a_rank_that_does_not_come(rank: int) -> None:
    patience = timedelta(milliseconds=50)
    assert offset_over_store(HashStore(), rank, TWO_HOSTS, patience) is None


@given(
    times=st.lists(st.integers(10**15, 10**15 + 10**10), min_size=2, max_size=20),
    offsets=st.lists(
        st.tuples(st.integers(10**15, 10**15 + 10**10), st.integers(-(10**6), 10**6)),
        max_size=3,
        unique_by=lambda offset: offset[0],
    ),
)
def test_a_clock_that_is_set_right_never_runs_backwards(
    times: list[int], offsets: list[tuple[int, int]]
) -> None:
    """Offsets move by at most 2 ms here, and lie apart: real clocks drift by millionths."""
    spread = [
        {"at": at + index * 10**11, "offset_ns": offset, "error_ns": 1}
        for index, (at, offset) in enumerate(sorted(offsets))
    ]
    clock = HostClock(spread)
    right = [clock.on_rank_0(at) for at in sorted(times)]
    assert right == sorted(right)
    for offset in spread:
        assert clock.on_rank_0(offset["at"]) == offset["at"] + offset["offset_ns"]
    assert clock.facts()["measured"] == len(spread)

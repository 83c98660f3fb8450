"""The client's shared memory: nothing is given out twice, and only the right one is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.server.protocol.arena import Arena, NotShared, Spans

LENGTH = 64 * 100


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make(LENGTH)
    yield made
    made.close()


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(-100, -1)), max_size=80))
def test_spans_never_overlap_and_all_come_back(steps: list[int]) -> None:
    """A positive step takes so much; a negative one gives back one of those taken."""
    spans = Spans(100)
    taken: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = spans.take(step)
            used = {place for at, length in taken.items() for place in range(at, at + length)}
            fits = any(used.isdisjoint(range(at, at + step)) for at in range(100 - step + 1))
            assert (offset is not None) == fits
            if offset is not None:
                assert 0 <= offset <= 100 - step
                assert used.isdisjoint(range(offset, offset + step))
                taken[offset] = step
        elif taken:
            offset = sorted(taken)[step % len(taken)]
            del taken[offset]
            spans.give_back(offset)
    for offset in taken:
        spans.give_back(offset)
    assert spans.take(100) == 0, "all pieces have grown together again"


def test_what_is_given_back_twice_is_noticed(arena: Arena) -> None:
    taken = arena.take(10)
    assert taken is not None
    arena.give_back(taken)
    with pytest.raises(AssertionError):
        arena.give_back(taken)
    with pytest.raises(AssertionError):
        arena.give_back(torch.zeros(10))


def test_memory_is_aligned_of_the_right_length_and_ends(arena: Arena) -> None:
    pieces = []
    while (piece := arena.take(65)) is not None:
        pieces.append(piece)
    assert len(pieces) == 50, "each takes 128 bytes"
    assert all(piece.data_ptr() % 64 == 0 and piece.shape == (65,) for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    for piece in pieces:
        arena.give_back(piece.view(torch.int8))
    assert arena.take(LENGTH) is not None


def test_tensors_are_found_where_they_lie(arena: Arena) -> None:
    arena.take(100)
    taken = arena.take(400)
    assert taken is not None
    assert arena.locate(taken) == 128
    numbers = taken.view(torch.float32)[10:20]
    assert arena.locate(numbers) == 128 + 40
    numbers.fill_(7)
    assert (arena.view(168, 40, torch.float32) == 7).all()
    whole = arena.view(0, arena.length)
    assert arena.locate(whole) == 0
    assert arena.locate(torch.zeros(10)) is None
    assert arena.locate(taken[:0]) is None


@pytest.mark.parametrize(
    ("offset", "length", "dtype"),
    [
        (-64, 64, torch.uint8),
        (LENGTH, 1, torch.uint8),
        (LENGTH - 1, 2, torch.uint8),
        (2**63, 8, torch.uint8),
        (0, 2**63, torch.uint8),
        (0, 0, torch.uint8),
        (2, 8, torch.float32),
        (0, 6, torch.float32),
    ],
)
def test_what_is_outside_or_askew_is_refused(
    arena: Arena, offset: int, length: int, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes at {offset}"):
        arena.view(offset, length, dtype)


def test_the_other_end_sees_the_same_memory(arena: Arena) -> None:
    other = Arena.open(arena.describe(), os.geteuid())
    taken = arena.take(8)
    assert taken is not None
    offset = arena.locate(taken)
    assert offset is not None
    other.view(offset, 8).fill_(9)
    assert taken.tolist() == [9] * 8
    assert other.take(8) is None, "only its maker gives it out"
    other.close()
    Arena.open(arena.describe(), os.geteuid())  # closing one end is not closing the other


def test_memory_of_a_process_that_has_closed_it_is_not_opened(arena: Arena) -> None:
    description = arena.describe()
    other = Arena.open(description, os.geteuid())
    arena.close()
    with pytest.raises(NotShared):
        Arena.open(description, os.geteuid())
    other.view(0, 8).fill_(1)  # what was opened before stays


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot": "another"}, "another host"),
        ({"length": LENGTH}, "not shared memory of"),
        ({"length": 2**40}, "not shared memory of"),
        ({"token": "00" * 16}, "another one here"),
        ({"pid": 2**22 + 1}, "cannot open"),
        ({"pid": -1}, "incomplete"),
        ({"pid": "self"}, "incomplete"),
        ({"descriptor": "../environ"}, "incomplete"),
        ({"descriptor": 10**6}, "cannot open"),
        ({"length": None}, "incomplete"),
    ],
)
def test_any_other_memory_is_refused(arena: Arena, change: dict[str, object], reason: str) -> None:
    with pytest.raises(NotShared, match=reason):
        Arena.open(arena.describe() | change, os.geteuid())


def test_a_process_of_another_user_is_refused(arena: Arena) -> None:
    with pytest.raises(NotShared, match="belongs to user"):
        Arena.open(arena.describe(), os.geteuid() + 1)


def test_another_file_of_the_same_process_is_refused(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LENGTH + 64))
    with path.open("r+b") as file, pytest.raises(NotShared, match="another one here"):
        Arena.open(arena.describe() | {"descriptor": file.fileno()}, os.geteuid())
    reading, writing = os.pipe()
    try:
        with pytest.raises(NotShared, match="not shared memory"):
            Arena.open(arena.describe() | {"descriptor": reading}, os.geteuid())
    finally:
        os.close(reading)
        os.close(writing)


def test_memory_does_not_outlive_its_process() -> None:
    script = (
        "import json, sys; from farandole.server.protocol.arena import Arena;"
        "print(json.dumps(Arena.make(64).describe()), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        description = json.loads(process.stdout.readline())
        assert Arena.open(description, os.geteuid()).length == 64
        process.communicate("")
    with pytest.raises(NotShared, match="cannot open"):
        Arena.open(description, os.geteuid())

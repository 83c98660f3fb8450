"""`fd.data.mix`: exact counts in every epoch, and every sample once before any is used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import farandole as fd
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.lanes import Readers
from farandole.data.chunks.source import ChunkSource
from farandole.data.mixture import MixedDataset
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train import Run


class Numbers(ChunkSource):
    """Numbers from `first` on, in chunks of these sizes."""

    def __init__(self, sizes: list[int], first: int) -> None:
        self.name = f"numbers from {first}"
        self.sizes = sizes
        self._first = first

    def read(self, chunk: int) -> list[int]:
        begin = self._first + sum(self.sizes[:chunk])
        return list(range(begin, begin + self.sizes[chunk]))


def chunked(sizes: list[int], first: int) -> ChunkedDataset:
    return ChunkedDataset([Numbers(sizes, first)], window=2, ahead=0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    plain=st.integers(1, 15),
    weight=st.floats(0.2, 5),
    samples=st.integers(12, 40),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_counts_are_exact_and_passes_whole(
    sizes: list[int], plain: int, weight: float, samples: int, ranks: int, seed: int
) -> None:
    chunks, others = chunked(sizes, 1000), list(range(plain))
    mixture = MixedDataset([chunks, others], [0, 0])
    counts = fd.data.mix({chunks: weight, Listed(plain): 1.0}, samples=samples).counts
    assert sum(counts) == samples
    assert abs(counts[0] - samples * weight / (weight + 1)) < 1
    mixture.counts = counts
    readers = Readers(ranks, ranks * 2, 1, False, False)
    used: Counter[int] = Counter()
    for epoch in range(4):
        order = mixture.order(readers, seed, epoch)
        assert (order == mixture.order(readers, seed, epoch)).all()
        drawn = [mixture[int(index)] for index in order]
        assert sum(number >= 1000 for number in drawn) == counts[0]
        used.update(drawn)
        for numbers in (range(1000, 1000 + sum(sizes)), range(plain)):
            times = [used[number] for number in numbers]
            assert max(times) - min(times) <= 1  # none again before all others
    plainly = mixture.order(readers, None, 0)
    for first, second in ((1000, 2000), (0, 1000)):
        numbers = [n for n in (mixture[int(i)] for i in plainly) if first <= n < second]
        whole = sum(sizes) if first else plain
        assert all(b == a + 1 or (b - first == 0) for a, b in pairwise(numbers))
        assert numbers[: min(whole, len(numbers))] == list(
            range(first, first + min(whole, len(numbers)))
        )


class Listed(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


def test_in_a_loader_and_on_other_numbers_of_workers(tmp_path: Path) -> None:
    mixture = fd.data.mix({chunked([4, 3, 5], 1000): 3, Listed(9): 1}, samples=24)
    assert mixture.counts == [18, 6]

    def body(run: Run) -> tuple[list[list[int]], dict[str, Any]]:
        loader = run.loader(mixture, global_batch_size=6)
        before = [int(n) for batch in loader for n in batch]
        part: list[int] = []
        for step, batch in enumerate(loader):
            part += batch.tolist()
            if step == 1:
                return [before, part], loader.state_dict()
        raise AssertionError

    halves = run_world(2, body, folder=tmp_path)
    state = halves[0][1]

    def rest(run: Run) -> list[int]:
        loader = run.loader(mixture, global_batch_size=6)
        loader.load_state_dict(state)
        return [int(n) for batch in loader for n in batch]

    first = Counter(n for (seen, _) in halves for n in seen[0])
    second = Counter(n for (seen, _) in halves for n in seen[1])
    second.update(n for each in run_world(3, rest, folder=tmp_path) for n in each)
    for epoch in (first, second):
        assert sum(count for n, count in epoch.items() if n >= 1000) == 18
    both = first + second
    assert {both[n] for n in range(1000, 1012)} == {3}  # 36 samples of 12
    assert {both[n] for n in range(9)} <= {1, 2}


def test_plain_loaders_see_an_epoch_too() -> None:
    mixture = fd.data.mix({Listed(4): 1, TensorDataset(torch.arange(100, 104)): 1})
    assert len(mixture) == len(list(mixture)) == 8
    drawn = [int(n[0]) if isinstance(n, (tuple, list)) else int(n) for n in mixture]
    assert sorted(drawn) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert sum(len(batch) for batch in DataLoader(fd.data.mix({Listed(4): 1}), batch_size=2)) == 4
    with pytest.raises(IndexError):
        mixture[16]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(UserError, match=r"the weight of Listed is 0: it must be above 0"):
        fd.data.mix({Listed(3): 0})
    with pytest.raises(UserError, match="at least one dataset"):
        fd.data.mix({})
    with pytest.raises(UserError, match="Stream has no length"):
        fd.data.mix({Stream(): 1})
    with pytest.raises(UserError, match="Listed is empty"):
        fd.data.mix({Listed(0): 1})
    with pytest.raises(UserError, match="a mix of mixes"):
        fd.data.mix({fd.data.mix({Listed(3): 1}): 1})
    with pytest.raises(UserError, match=r"an epoch of 3 samples has none of ChunkedDataset of num"):
        fd.data.mix({Listed(3): 100, chunked([2], 7): 0.1}, samples=3)

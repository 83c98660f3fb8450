"""Saved in the middle of an epoch, a loader goes on with exactly the samples not yet seen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from farandole.data import Loader
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.source import ChunkSource
from farandole.testing import run_world
from farandole.train import Run

Batches = list[list[int]]


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class NumberChunks(ChunkSource):
    def __init__(self, count: int) -> None:
        self.name = "numbers"
        self.sizes = [*([3] * (count // 3)), count % 3]

    def read(self, chunk: int) -> list[int]:
        return list(range(3 * chunk, 3 * chunk + self.sizes[chunk]))


def make_loader(run: Run, kind: str, count: int, **batch: Any) -> Loader:
    if kind == "stream":
        return run.loader(Stream(count), **batch)
    if kind == "dataset":
        return run.loader(TensorDataset(torch.arange(count)), **batch)
    if kind == "chunks":
        return run.loader(ChunkedDataset([NumberChunks(count)], window=2), **batch)
    generator = torch.Generator().manual_seed(run.rank)  # each draw differs from the last
    sampler = WeightedRandomSampler([1.0] * count, count, generator=generator)
    given_loader = DataLoader(TensorDataset(torch.arange(count)), sampler=sampler)
    return run.loader(given_loader, **batch)


def numbers(run: Run, loader: Loader, batch: Any) -> list[int]:
    """The samples, or nothing if ranks before this one have read them too."""
    info = loader.last_batch
    assert info is not None
    if run.rank >= (1 if info.readers == run.size else info.samples):
        return []
    return (batch if isinstance(batch, torch.Tensor) else batch[0]).tolist()


def interrupted(
    folder: Path, kind: str, count: int, size: int, steps: int, **batch: Any
) -> tuple[Batches, Batches, dict[str, Any]]:
    """Global batches before and after `steps` steps of the second epoch, and the state between."""

    def body(run: Run) -> tuple[Batches, dict[str, Any]]:
        loader = make_loader(run, kind, count, **batch)
        for _ in loader:
            pass
        seen, state = [], {}
        for step, drawn in enumerate(loader):
            seen.append(numbers(run, loader, drawn))
            if step + 1 == steps:
                state = loader.state_dict()
        return seen, state

    by_rank = run_world(size, body, folder=folder)
    whole = together([seen for seen, _ in by_rank])
    return whole[:steps], whole[steps:], by_rank[0][1]


def resumed(
    folder: Path, kind: str, count: int, size: int, state: dict[str, Any], **batch: Any
) -> tuple[Batches, Batches]:
    """Global batches of the resumed epoch and of the one after it."""

    def body(run: Run) -> tuple[Batches, Batches]:
        loader = make_loader(run, kind, count, **batch)
        loader.load_state_dict(state)
        now = [numbers(run, loader, drawn) for drawn in loader]
        return now, [numbers(run, loader, drawn) for drawn in loader]

    by_rank = run_world(size, body, folder=folder)
    return together([now for now, _ in by_rank]), together([later for _, later in by_rank])


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def together(by_rank: list[Batches]) -> Batches:
    return [flat(shares) for shares in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("kind", ["dataset", "sampler", "stream", "chunks"])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_exactly_the_remaining_batches_follow(tmp_path: Path, kind: str, steps: int) -> None:
    before, after, state = interrupted(tmp_path, kind, 25, 3, steps, batch_size=2)
    assert len(before) == steps
    now, later = resumed(tmp_path, kind, 25, 3, state, batch_size=2)
    assert now == after
    assert len(flat(later)) == 25


def test_saved_at_the_last_batch_nothing_is_left_of_the_epoch(tmp_path: Path) -> None:
    _, after, state = interrupted(tmp_path, "dataset", 20, 2, 5, batch_size=2)
    assert after == []
    now, later = resumed(tmp_path, "dataset", 20, 2, state, batch_size=2)
    assert now == []
    assert sorted(flat(later)) == list(range(20))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["dataset", "sampler", "stream", "chunks"]),
    count=st.integers(8, 40),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 4),
    data=st.data(),
)
def test_on_another_number_of_workers_no_sample_is_lost_or_repeated(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    count: int,
    sizes: tuple[int, int],
    batch: int,
    data: st.DataObject,
) -> None:
    """With a batch per worker, a step is another number of samples; the samples are what counts."""
    folder = tmp_path_factory.mktemp("other")
    most = max(1, count // (sizes[0] * batch))
    steps = data.draw(st.integers(1, most))
    _, after, state = interrupted(folder, kind, count, sizes[0], steps, batch_size=batch)
    now, _ = resumed(folder, kind, count, sizes[1], state, batch_size=batch)
    assert flat(now) == flat(after)  # and in the same order


def test_the_state_of_a_plain_loader_is_two_numbers(tmp_path: Path) -> None:
    _, _, state = interrupted(tmp_path, "dataset", 20, 2, 3, batch_size=2)
    assert json.loads(json.dumps(state)) == {"epoch": 1, "done_samples": 12}


def test_the_state_between_epochs_needs_no_drawn_order(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[set[str], set[str]]:
        loader = make_loader(run, "sampler", 8, batch_size=4)
        for _ in loader:
            middle = set(loader.state_dict())
        return middle, set(loader.state_dict())

    middle, between = run_world(1, body, folder=tmp_path)[0]
    assert middle == {"epoch", "done_samples", "drawn"}
    assert between == {"epoch", "done_samples"}


@pytest.mark.parametrize("kind", ["dataset", "stream", "chunks"])
def test_dropping_the_tail_still_means_the_tail_after_resuming(tmp_path: Path, kind: str) -> None:
    options = {"batch_size": 3, "drop_last": True, "shuffle": False}
    _, after, state = interrupted(tmp_path, kind, 23, 2, 2, **options)
    assert after == [list(range(12, 18))]
    assert resumed(tmp_path, kind, 23, 2, state, **options)[0] == after
    # Of the 11 samples left, 4 workers drop all: fewer than their batch of 12.
    assert resumed(tmp_path, kind, 23, 4, state, **options)[0] == []

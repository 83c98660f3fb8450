"""An iterable dataset that is another one on each rank, or after a resume, is found out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from farandole.data.streams.check import digests
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train import Run


class SplitByRank(IterableDataset[Any]):
    """As scripts for torch.distributed have it: farandole would split it once more."""

    def __init__(self, rank: int, size: int) -> None:
        self.numbers = range(rank, 40, size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"x": torch.tensor([number]), "name": str(number)} for number in self.numbers)


class Augmented(IterableDataset[Any]):
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Any]:
        return ((self.random.random(3), number) for number in range(12))


class Shuffled(IterableDataset[int]):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(40), 40))


def test_a_stream_that_splits_itself_by_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        with pytest.raises(UserError, match=r"ranks 0 and 1 differ, so samples would be lost"):
            next(iter(run.loader(SplitByRank(run.rank, run.size), batch_size=2)))

    run_world(3, body, folder=tmp_path)


def test_samples_that_are_changed_at_random_are_named_and_used(tmp_path: Path) -> None:
    def body(run: Run) -> int:
        return sum(len(y) for _, y in run.loader(Augmented(run.rank), batch_size=2))

    with pytest.warns(UserWarning, match="differ between ranks 0 and 1 in '0', and are the same"):
        seen = run_world(2, body, folder=tmp_path)
    assert sum(seen) == 12


def test_an_epoch_that_goes_on_in_another_order_is_named(tmp_path: Path) -> None:
    def body(run: Run) -> dict[str, Any]:
        loader = run.loader(Shuffled(1), batch_size=4)
        for step, _ in enumerate(loader):
            if step == 2:
                return loader.state_dict()
        raise AssertionError

    def resumed(seed: int) -> set[int]:
        def rest(run: Run) -> set[int]:
            loader = run.loader(Shuffled(seed), batch_size=2)
            loader.load_state_dict(state)
            return {number for batch in loader for number in batch.tolist()}

        return set().union(*run_world(2, rest, folder=tmp_path))

    (state,) = run_world(1, body, folder=tmp_path)
    before = random.Random(1).sample(range(40), 40)[:12]
    assert resumed(1) == set(range(40)) - set(before)
    with pytest.warns(UserWarning, match="12 samples of this epoch were used before"):
        resumed(2)


def test_every_kind_of_value_is_compared_or_left_out() -> None:
    sample = {
        "x": [torch.ones(2, dtype=torch.bfloat16), np.float32(1)],
        "y": ("text", b"bytes", None, 1.5),
        "z": object(),
        "objects": np.array([object()]),
        "sparse": torch.eye(2).to_sparse(),
    }
    found = digests([sample, sample])
    assert sorted(found) == ["x.0", "x.1", "y.0", "y.1", "y.2", "y.3"]
    assert found == digests([sample, sample]) != digests([sample])

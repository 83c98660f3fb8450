"""A loader can be asked what a DataLoader can, and answers for its rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler
from torch.utils.data._utils.collate import default_collate

from farandole.data.tile_source import TileView
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train import Run

NUMBERS: Any = range(14)  # a dataset is anything with a length and indices
PLAIN = (
    "num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order",
    "drop_last", "batch_size",
)  # fmt: skip


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


def initialise(worker: int) -> None:
    pass


def collate(batch: list[int]) -> torch.Tensor:
    return torch.tensor(batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "num_workers": 2,
            "collate_fn": collate,
            "timeout": 7.0,
            "worker_init_fn": initialise,
            "generator": torch.Generator(),
            "prefetch_factor": 3,
            "persistent_workers": True,
            "multiprocessing_context": "spawn",
            "drop_last": True,
        },
    ],
)
def test_alone_it_says_what_a_dataloader_says(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs: DataLoader[Any] = DataLoader(NUMBERS, 4, **options)

    def body(run: Run) -> None:
        for ours in (run.loader(NUMBERS, 4, **options), run.loader(theirs)):
            for name in PLAIN:
                assert getattr(ours, name) == getattr(theirs, name), name
            assert ours.dataset is NUMBERS
            assert len(ours) == len(theirs)
            assert ours.sampler is not None
            assert ours.batch_sampler is not None
            assert len(ours.batch_sampler) == len(theirs)  # type: ignore[arg-type]

    run_world(1, body, folder=tmp_path)


def test_every_public_attribute_of_a_dataloader_is_there(tmp_path: Path) -> None:
    theirs: DataLoader[Any] = DataLoader(NUMBERS, 4)
    public = {name for name in vars(theirs) if not name.startswith("_")}

    def body(run: Run) -> None:
        ours = run.loader(NUMBERS, 4)
        assert not [name for name in public if not hasattr(ours, name)]
        with pytest.raises(AttributeError):
            ours.num_workers = 4  # type: ignore[misc]

    run_world(1, body, folder=tmp_path)


def test_with_several_ranks_each_answers_for_itself(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[list[list[int]], list[int], int, int, int]:
        loader = run.loader(NUMBERS, global_batch_size=7)
        sampler, batches = loader.sampler, loader.batch_sampler
        assert sampler is not None
        assert batches is not None
        asked = list(batches)
        assert list(sampler) == [index for batch in asked for index in batch]
        assert [batch.tolist() for batch in loader] == asked, "asking has used nothing up"
        assert loader.dataset is NUMBERS
        return asked, [len(batch) for batch in asked], loader.batch_size, len(sampler), len(batches)  # type: ignore[arg-type]

    answers = run_world(3, body, folder=tmp_path)
    indices = [index for asked, *_ in answers for batch in asked for index in batch]
    assert sorted(indices) == list(range(14))
    assert [rest for _, *rest in answers] == [
        [[2, 2], 2, 4, 2],
        [[2, 2], 2, 4, 2],
        [[3, 3], 3, 6, 2],
    ]


def test_a_sampler_of_one_s_own_is_the_sampler(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[list[int], list[int]]:
        own = SubsetRandomSampler([5, 1, 4, 2], generator=torch.Generator().manual_seed(run.rank))
        loader = run.loader(NUMBERS, 2, sampler=own)
        assert loader.sampler is own
        assert loader.batch_sampler is not None
        asked = [index for batch in loader.batch_sampler for index in batch]
        return asked, [index for batch in loader for index in batch.tolist()]

    answers = run_world(2, body, folder=tmp_path)
    assert all(asked == read for asked, read in answers)
    assert sorted(answers[0][0] + answers[1][0]) == [1, 2, 4, 5]


def test_a_stream_has_no_indices(tmp_path: Path) -> None:
    stream = Stream()

    def body(run: Run) -> None:
        loader = run.loader(stream, 2)
        assert loader.dataset is stream
        assert loader.sampler is None
        assert loader.batch_sampler is None
        assert loader.batch_size == 2
        assert loader.collate_fn is default_collate
        assert run.loader(stream, 2, collate_fn=collate).collate_fn is collate

    run_world(2, body, folder=tmp_path)


class Image:
    """Read in parts; see `TileSource`."""

    image_size = (4, 4)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4, 4), index)

    def tile(self, index: int, box: tuple[slice, ...]) -> torch.Tensor:
        return self[index][box]


def test_the_dataset_is_the_one_that_was_given_where_a_rank_reads_a_tile(tmp_path: Path) -> None:
    image = Image()

    def body(run: Run) -> None:
        view = TileView(image, (slice(0, 2), slice(0, 4)))
        loader = run.loader(view, 1)
        assert loader.dataset is image  # type: ignore[comparison-overlap]
        assert next(iter(loader)).shape == (1, 2, 4)

    run_world(1, body, folder=tmp_path)


def test_batches_in_any_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in_order=False"):
        run_world(1, lambda run: run.loader(NUMBERS, 4, in_order=False), folder=tmp_path)

"""The options of a loader: the caller's, and those of a DataLoader that the caller passed."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from farandole.errors import UserError

SHARES: Final = ("equal", "speed")


@dataclass(frozen=True)
class LoaderOptions:
    """How to cut and load. `batch_size` is per rank; `global_batch_size` is over all of them.

    `shuffle` None: as the given DataLoader does; a dataset is shuffled.
    """

    batch_size: int | None = None
    global_batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    seed: int = 0
    training: bool | None = None  # None: what is read with gradients enabled is training
    shares: str = "equal"  # of the ranks in a step, or by "speed"

    def __post_init__(self) -> None:
        if self.shares not in SHARES:
            raise UserError(f"shares={self.shares!r}: shares are {' or '.join(SHARES)}.")

    @property
    def is_training(self) -> bool:
        """Whether a pass that is read now trains, and is no evaluation."""
        return torch.is_grad_enabled() if self.training is None else self.training

    def global_batch(self, size: int) -> int:
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise UserError(
                f"give either batch_size (per worker) or global_batch_size (over all workers), "
                f"not batch_size={self.batch_size} and global_batch_size={self.global_batch_size}."
            )
        wanted = self.batch_size * size if self.batch_size else self.global_batch_size or 0
        if wanted < 1:
            given = self.batch_size if self.batch_size is not None else self.global_batch_size
            raise UserError(f"a batch of {given} samples cannot be: it needs at least one.")
        return wanted


@dataclass(frozen=True)
class ResolvedLoader:
    """A dataset, how to cut it and how to load it."""

    dataset: Dataset[Any]
    options: LoaderOptions
    torch_options: dict[str, Any]  # for the DataLoader that each rank loads with
    sampler: Sampler[int] | None = None  # the user's own, when neither random nor in order


def resolve(
    source: Dataset[Any] | DataLoader[Any], options: LoaderOptions, torch_options: dict[str, Any]
) -> ResolvedLoader:
    """Takes over a DataLoader's settings; what the caller says explicitly wins.

    Raises `UserError` when the data are cut already, or two settings contradict each other.
    """
    if torch_options.get("in_order") is False:
        raise UserError(
            "in_order=False hands out batches as they come, and run.loader must know which one it "
            "hands out: all ranks train on the same step, and a resumed run on the rest. Leave it "
            "out."
        )
    for name in ("sampler", "batch_sampler"):
        if name in torch_options:
            source = _with_own(name, source, options, torch_options)
            torch_options = {k: v for k, v in torch_options.items() if k != name}
    if not isinstance(source, DataLoader):
        return ResolvedLoader(source, options, torch_options)
    sampler = None
    if not isinstance(source.dataset, IterableDataset):
        sampler = _own_sampler(source)
        if options.shuffle is None:
            options = replace(options, shuffle=isinstance(source.sampler, RandomSampler))
        elif sampler is not None:
            raise UserError(
                f"shuffle={options.shuffle} and the DataLoader's own {type(sampler).__name__} "
                "contradict each other. Leave out one of them."
            )
    if options.batch_size is None and options.global_batch_size is None:
        options = replace(options, batch_size=source.batch_size)
    options = replace(options, drop_last=source.drop_last or options.drop_last)
    inherited = {name: getattr(source, name) for name in _INHERITED}
    return ResolvedLoader(source.dataset, options, {**inherited, **torch_options}, sampler)


def _with_own(
    name: str, source: Any, options: LoaderOptions, torch_options: dict[str, Any]
) -> DataLoader[Any]:
    """A dataset and a sampler, as the DataLoader that one could have passed instead."""
    if isinstance(source, DataLoader):
        raise UserError(f"{name}=… goes to the DataLoader, or with the dataset: not beside both.")
    options.global_batch(size=1)  # must be said here: a DataLoader's own default is 1
    return DataLoader(source, **{name: torch_options[name]})


def _own_sampler(given: DataLoader[Any]) -> Sampler[int] | None:
    sampler: Any = given.sampler
    if isinstance(sampler, DistributedSampler):
        raise UserError(
            "this DataLoader already shares its data with a DistributedSampler, and "
            "run.loader would share each share again. Pass the dataset instead."
        )
    if given.batch_size is None:
        raise UserError(
            "a DataLoader with its own batch_sampler, or with batch_size=None, cannot be "
            "shared. Pass the dataset and batch_size to run.loader."
        )
    # These two visit every sample once: then we order the epoch ourselves.
    plain = type(sampler) in (RandomSampler, SequentialSampler)
    replacing = getattr(sampler, "replacement", False)
    if plain and not replacing and len(sampler) == len(cast(Sized, given.dataset)):
        return None
    return cast(Sampler[int], sampler)


_INHERITED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip

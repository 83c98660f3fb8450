"""What scripts ask a DataLoader, answered by a `Loader`: the same names, for this rank.

They can be read and not set: to change one, ask `run.loader` for another loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from farandole.comm import Group
from farandole.data.bad_samples import SkippingCollate
from farandole.data.options import LoaderOptions, ResolvedLoader
from farandole.data.position import Position
from farandole.data.samplers import RankBatches, RankBatchSampler, RankSampler
from farandole.data.shares import part_of
from farandole.data.streams.share import StreamShare
from farandole.data.tile_source import TileView


class DataLoaderMirror:
    """The part of a `Loader` that looks like a DataLoader."""

    position: Position
    options: LoaderOptions
    _resolved: ResolvedLoader
    _batches: RankBatches | StreamShare
    _inner: DataLoader[Any]
    _group: Group

    @property
    def dataset(self) -> Dataset[Any]:
        """The whole dataset, as it was given: all ranks' samples."""
        dataset = self._resolved.dataset
        return dataset.source if isinstance(dataset, TileView) else dataset  # type: ignore[return-value]

    @property
    def batch_size(self) -> int:
        """How many samples of a full step are this rank's."""
        rank, size = self._group.rank, self._group.size
        whole = self.options.global_batch(size)
        quotas = () if isinstance(self._batches, StreamShare) else self._batches.shares.quotas
        return int(part_of(whole, size, rank, whole, quotas).samples)

    @property
    def drop_last(self) -> bool:
        return self.options.drop_last

    @property
    def sampler(self) -> Sampler[int] | None:
        """The sampler that was given, over all ranks' samples; else this rank's indices.

        None for an iterable dataset, which has no indices.
        """
        if isinstance(self._batches, StreamShare):
            return None
        own = self._resolved.sampler
        return own if own is not None else RankSampler(self._batches, self.position)

    @property
    def batch_sampler(self) -> Sampler[list[int]] | None:
        """This rank's indices, by steps; None for an iterable dataset.

        With a sampler of one's own, iterating over it is done *together*: rank 0 draws.
        """
        sampler = self.sampler
        if isinstance(self._batches, StreamShare) or sampler is None:
            return None
        return RankBatchSampler(self._batches, self.position, sampler, self.batch_size)

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """What makes a batch of this rank's samples."""
        inner = self._batches if isinstance(self._batches, StreamShare) else self._inner
        collate: Any = inner.collate_fn
        return collate.own if isinstance(collate, SkippingCollate) else collate

    @property
    def generator(self) -> torch.Generator | None:
        """The one that was given. It seeds loading processes; it does not shuffle."""
        return self._resolved.torch_options.get("generator")

    @property
    def num_workers(self) -> int:
        """Loading processes of this rank. Each rank has so many."""
        return self._inner.num_workers

    @property
    def pin_memory(self) -> bool:
        return self._inner.pin_memory

    @property
    def pin_memory_device(self) -> str:
        return self._inner.pin_memory_device

    @property
    def timeout(self) -> float:
        return self._inner.timeout

    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None:
        return self._resolved.torch_options.get("worker_init_fn")

    @property
    def multiprocessing_context(self) -> Any:
        return self._inner.multiprocessing_context

    @property
    def prefetch_factor(self) -> int | None:
        return self._inner.prefetch_factor

    @property
    def persistent_workers(self) -> bool:
        return self._inner.persistent_workers

    @property
    def in_order(self) -> bool:
        return self._inner.in_order

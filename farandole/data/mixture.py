"""`fd.data.mix`: several datasets in one epoch, each with a share of its samples.

An epoch has a fixed number of samples of each source. A source goes on in every epoch where it
stopped in the one before, and begins anew, in another order, when it is used up:

    source a, 5 samples, 3 in each epoch     pass 0        pass 1
                                             2 0 4 1 3  │  1 4 0 3 2  │ …
                                             └epoch 0┘└─epoch 1─┘└epoch 2┘

So every sample of a source is used once before any of them is used again, over all epochs. All of
this depends on the seed and the epoch only, like every order here: nothing else has to be kept to
go on in the middle of an epoch. A source that is read in chunks (`chunks`) is read so here too.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from farandole.data.bad_samples import OnError
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.lanes import Indices, Readers, lane_order
from farandole.data.order import mixed
from farandole.errors import UserError


def mix(weights: Mapping[Any, float], *, samples: int | None = None) -> MixedDataset:
    """Datasets and how much of an epoch comes of each: `fd.data.mix({a: 0.7, b: 0.3})`.

    Weights are relative to each other. An epoch has `samples` samples, or as many as all datasets
    together; of each dataset exactly its share of them, rounded so that they add up. A dataset that
    gives more than it has repeats samples within an epoch; one that gives less leaves the others to
    the next epochs. Over all epochs, every sample of a dataset is used once before any is again.
    """
    sources = list(weights)
    for source, weight in weights.items():
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
            raise UserError(f"the weight of {_shown(source)} is {weight!r}: it must be above 0.")
        _check(source)
    if not sources:
        raise UserError("a mix needs at least one dataset: fd.data.mix({a: 0.7, b: 0.3}).")
    count = sum(map(len, sources)) if samples is None else samples
    counts = _rounded([float(weight) for weight in weights.values()], count)
    for source, own in zip(sources, counts, strict=True):
        if own < 1:
            raise UserError(
                f"an epoch of {count} samples has none of {_shown(source)}, whose weight is "
                f"{weights[source]}. Say more samples=, or leave it out."
            )
    return MixedDataset(sources, counts)


class MixedDataset(Dataset[Any]):
    """Samples 0 to `len - 1` are an epoch in order; what follows are all samples of all sources,
    one source after the other, which is what `order` refers to."""

    def __init__(self, sources: Sequence[Any], counts: Sequence[int]) -> None:
        self.sources = list(sources)
        self.counts = list(counts)  # of each source, in an epoch
        self._ends = list(accumulate(len(source) for source in sources))
        self._plain: Indices | None = None

    @property
    def on_error(self) -> OnError:
        skips = any(getattr(source, "on_error", "raise") == "skip" for source in self.sources)
        return "skip" if skips else "raise"

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self) + self._ends[-1]:
            raise IndexError(f"sample {index} of {len(self)}")
        if index < len(self):
            if self._plain is None:
                self._plain = self.order(None, None, 0)
            index = int(self._plain[index])
        at = index - len(self)
        number = bisect.bisect_right(self._ends, at)
        source = self.sources[number]
        return source[at - self._ends[number] + len(source)]

    def order(self, readers: Readers | None, seed: int | None, epoch: int) -> Indices:
        """Of an epoch that begins with these readers; `seed` None: not shuffled."""
        lanes = np.zeros(len(self), np.int64) if readers is None else readers.lanes(len(self))
        labels = _labels(self.counts, None if seed is None else mixed(seed, epoch))
        order = np.empty(len(self), dtype=np.int64)
        for number, source in enumerate(self.sources):
            places = np.flatnonzero(labels == number)
            chunked = isinstance(source, ChunkedDataset)
            sizes = np.asarray(source.chunk_sizes) if chunked else np.ones(len(source), np.int64)
            window = source.window if chunked else len(source)
            own = None if seed is None else mixed(seed, number)
            starts, taken = _pieces(sizes, epoch * len(places), len(places), own)
            lane_seed = None if own is None else mixed(own, -1, epoch)
            at = lane_order(cast(Sequence[int], taken), lanes[places], window, lane_seed)
            ends = np.cumsum(taken)
            piece = np.searchsorted(ends, at, side="right")
            own_samples = starts[piece] + at - (ends - taken)[piece]
            order[places] = own_samples + len(self) + self._ends[number] - len(source)
        return order


def _labels(counts: Sequence[int], seed: int | None) -> Indices:
    """Which source each place of an epoch is of."""
    labels = np.repeat(np.arange(len(counts)), counts)
    if seed is not None:
        return np.random.default_rng(seed).permutation(labels)
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return labels[np.argsort(when, kind="stable")]  # each spread evenly


def _pieces(sizes: Indices, begin: int, count: int, seed: int | None) -> tuple[Indices, Indices]:
    """Chunks and parts of chunks: `count` samples from `begin` on, of pass after pass over all
    chunks. The first sample of each piece, and how many it has."""
    length = int(sizes.sum())
    first = np.cumsum(sizes) - sizes
    starts, taken = [], []
    for number in range(begin // length, -(-(begin + count) // length)):
        chunks = np.arange(len(sizes))
        if seed is not None:
            chunks = np.random.default_rng(mixed(seed, number)).permutation(len(sizes))
        ends = np.cumsum(sizes[chunks]) + number * length
        low = np.maximum(ends - sizes[chunks], begin)
        high = np.minimum(ends, begin + count)
        some = high > low
        starts.append((first[chunks] + low - (ends - sizes[chunks]))[some])
        taken.append((high - low)[some])
    return np.concatenate(starts), np.concatenate(taken)


def _rounded(weights: Sequence[float], count: int) -> list[int]:
    """Parts of `count` in proportion to the weights: what rounding down leaves goes to those that
    lost most by it."""
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * count / total for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_loss = sorted(range(len(parts)), key=lambda at: parts[at] - exact[at])
    for at in by_loss[: count - sum(parts)]:
        parts[at] += 1
    return parts


def _check(source: Any) -> None:
    if isinstance(source, MixedDataset):
        raise UserError("a mix of mixes: give all datasets to one fd.data.mix.")
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        raise UserError(
            f"{_shown(source)} has no length, and so no share of an epoch. Mix datasets that have."
        )
    if not len(source):
        raise UserError(f"{_shown(source)} is empty: there is nothing to mix.")


def _shown(source: Any) -> str:
    sources = getattr(source, "sources", None)
    return f"{type(source).__name__} of {sources[0].name}" if sources else type(source).__name__

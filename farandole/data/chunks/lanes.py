"""The order of an epoch over data that are read in chunks.

Reading samples in an arbitrary order would read every chunk again for almost every sample. Reading
them in theirs would show the model all of one shard before the next. Between the two:

    chunks, shuffled           c3 c0 c5 c1 c4 c2
    cut into lanes             c3 c0 c5 │ c1 c4 c2           one for each process that reads
    mixed, `window` chunks     (c3 c0)(c0 c5) │ …            a chunk comes when one is used up
    dealt to the places that the reader of each lane takes

All samples are there exactly once, whatever happens to the ranks: this is one order of the epoch,
and places in it are used up like those of any other. The lanes only say who has which chunks at
hand. If an epoch goes on with other ranks, they go on with the order that it began with, and the
rest of it costs more reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farandole.data.shares import Shares

Indices = npt.NDArray[np.int64]


class Readers(NamedTuple):
    """Who reads an epoch, when it begins. Kept with the position in it."""

    ranks: int
    global_batch: int
    processes: int  # of each rank, which take batches in turn
    drop_last: bool
    evaluates: bool

    def lanes(self, count: int) -> Indices:
        """Of each place in the order of `count` samples, the lane that reads it."""
        shares = Shares(count, self.ranks, self.global_batch, self.drop_last, self.evaluates)
        lanes = np.zeros(count, dtype=np.int64)
        for step in range(shares.steps):
            process = step % self.processes
            for rank in reversed(range(self.ranks)):  # of several readers, the first one's
                share = shares.share(step, rank)
                lanes[share.start : share.stop] = rank * self.processes + process
        return lanes


def lane_order(sizes: Sequence[int], lanes: Indices, window: int, seed: int | None) -> Indices:
    """The sample at each place. `sizes` are those of the chunks; `seed` None: not shuffled."""
    counts = np.asarray(sizes, dtype=np.int64)
    random = None if seed is None else np.random.default_rng(seed)
    chunks = np.arange(len(counts)) if random is None else random.permutation(len(counts))
    starts = np.cumsum(counts) - counts
    turns = np.repeat(np.arange(len(chunks)), counts[chunks])  # whose turn each sample has
    first = np.cumsum(counts[chunks]) - counts[chunks]
    samples = np.arange(len(turns)) - first[turns] + starts[chunks][turns]
    order = np.empty(len(samples), dtype=np.int64)
    if random is None:  # then places are samples: whoever evaluates expects that order
        order[:] = samples
        return order
    places = np.argsort(lanes, kind="stable")
    borders = np.searchsorted(lanes[places], np.arange(lanes.max(initial=0) + 2))
    for begin, end in pairwise(borders):
        when = _spread(turns[begin:end], window, random)
        order[places[begin:end]] = samples[begin:end][np.argsort(when)]
    return order


def _spread(turns: Indices, window: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """When each sample of a lane comes, if chunk t of it lasts as long as its neighbours do:

    time     0 1 2 3
    chunk 0  ─                 window 3, 6 chunks: at any time three of them are mixed
    chunk 1  ───               and one is read while one is used up
    chunk 2  ─────
    chunk 3    ─────
    chunk 4      ───
    chunk 5        ─
    """
    chunk = turns - turns[:1]
    last = chunk.max(initial=0) + 1
    begin = np.maximum(0, chunk - window + 1)
    end = np.minimum(chunk + 1, max(1, last - window + 1))
    when: npt.NDArray[np.float64] = begin + random.random(len(turns)) * (end - begin)
    return when

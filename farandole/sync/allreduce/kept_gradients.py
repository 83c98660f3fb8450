"""Averages that outlive a lost rank: each rank keeps its own gradients until all have the averages.

The buckets of a backward pass are one unit (`farandole.comm.units`). A rank may be lost when some
of them are averaged with its part and others are not. Then no average is used: all survivors go
back to their own gradients, and average those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from farandole.comm import Group
from farandole.comm.units import Units
from farandole.errors import CommError
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reductions import Average, Pending, Reduction, settled


class KeptGradients(Reduction):
    """Does what `average` does, and can do it again from the gradients of this rank."""

    def __init__(self, group: Group, average: Average, units: Units) -> None:
        self._group = group
        self._average = average
        self._units = units
        self._memory: dict[int, torch.Tensor] = {}  # by the bucket's index
        self._kept: list[tuple[Bucket, torch.Tensor]] = []  # of the pass under way
        self._is_lost = False  # a bucket of this pass could not be averaged
        self._repeats = False
        self.factor = 1.0
        """By which the next repetition multiplies this rank's gradients."""

    def reduce(self, bucket: Bucket) -> Pending:
        self._keep(bucket)
        if not self._is_lost and self._units.rehearse is None:
            try:
                return self._average.reduce(bucket)
            except CommError:
                if not self._group.is_broken:
                    raise
                self._is_lost = True
        return settled(bucket.buffer)

    def finish(self, under_way: Sequence[Pending], spread: Callable[[], None]) -> None:
        def work() -> None:
            if self._repeats:
                for bucket, _ in self._kept:
                    self._group.average_future(bucket.buffer, last=True).wait()
            else:
                self._wait_for(under_way)
            spread()

        try:
            self._units.run_step(work, self._restore)
        finally:
            self._kept = []
            self._is_lost = self._repeats = False

    def close(self) -> None:
        self._average.close()

    def _keep(self, bucket: Bucket) -> None:
        memory = self._memory.get(bucket.index)
        if memory is None or memory.shape != bucket.buffer.shape:
            memory = self._memory[bucket.index] = torch.empty_like(bucket.buffer)
        self._kept.append((bucket, memory.copy_(bucket.buffer)))

    def _wait_for(self, under_way: Sequence[Pending]) -> None:
        try:
            for future in under_way:
                future.wait()
        except Exception:
            # The group goes on over other connections when all that used the old ones has ended.
            for future in under_way:
                with contextlib.suppress(Exception):
                    future.wait()
            raise
        if self._is_lost:
            raise CommError("a bucket of gradients could not be averaged")

    def _restore(self) -> None:
        self._repeats = True
        self._average.restart()
        factor, self.factor = self.factor, 1.0
        with torch.no_grad():
            for bucket, kept in self._kept:
                if factor != 1.0:
                    kept[: -len(bucket.trailer)].mul_(factor)
                bucket.buffer.copy_(kept)
                # The rank has another number now.
                bucket.note(self._group.rank)

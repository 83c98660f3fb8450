"""Which ranks a gradient is averaged over: all of them, or those of this host, by DASO's phase."""

from __future__ import annotations

from farandole.comm import Group
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reductions import Average, Pending, Reduction, settled


class PhaseReduction(Reduction):
    """Averages gradients over all ranks, or over those of this host."""

    def __init__(self, group: Group, local: Group | None) -> None:
        # Memory can be registered with one group only: that of the many steps.
        self._everywhere = Average(group, register=local is None)
        self._here = Average(local) if local is not None else None
        self._in_host = False
        self.done = False  # a backward pass has ended that nobody has counted yet

    def average_everywhere(self) -> None:
        self._in_host = False

    def average_in_host(self) -> None:
        self._in_host = True

    def reduce(self, bucket: Bucket) -> Pending:
        if bucket.is_last:
            self.done = True
        if not self._in_host:
            return self._everywhere.reduce(bucket)
        return self._here.reduce(bucket) if self._here is not None else settled(bucket.buffer)

    def close(self) -> None:
        self._everywhere.close()
        if self._here is not None:
            self._here.close()

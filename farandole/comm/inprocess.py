"""Ranks as threads of one process, as a c10d process group.

It serves two ends: a run that is alone is a world of one (so nothing else needs a special case),
and tests run many ranks fast and deterministically. Contributions are reduced in rank order by
each rank for itself, so every rank gets the same bits, and the same bits every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farandole.errors import CommError


class Exchange:
    """Where the ranks of an in-process world meet: each gives a value and gets everyone's."""

    def __init__(self, size: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.size = size
        self.timeout = timeout
        self._lock = threading.Condition()  # over a lock that its holder may take again
        self._round = 0
        self._given: dict[int, Any] = {}
        self._taken: list[Any] = []
        self._broken: str | None = None

    def swap(self, rank: int, value: Any, what: str) -> list[Any]:
        """Gives `value` for this round; returns all values in rank order once all have given.

        Raises `CommError` naming the ranks that did not come within the timeout, or the rank that
        failed. After that the exchange stays closed: a late rank must not meet a round that others
        have left.
        """
        with self._lock:
            if self._broken is not None:
                raise CommError(f"rank {rank}: {what} cannot go on: {self._broken}.")
            turn = self._round
            self._given[rank] = value
            if len(self._given) == self.size:
                self._taken = [self._given[r] for r in range(self.size)]
                self._given = {}
                self._round += 1
                self._lock.notify_all()
                return self._taken
            # A later round cannot overwrite `_taken` before this rank has read it: it needs this
            # rank's own contribution first.
            arrived = self._lock.wait_for(
                lambda: self._round > turn or self._broken is not None,
                self.timeout.total_seconds(),
            )
            if self._round > turn:
                return self._taken
            missing = sorted(set(range(self.size)) - set(self._given))
            reason = self._broken if arrived else f"no answer in {self.timeout.total_seconds():g} s"
            if not arrived:
                self.fail(f"rank {rank} gave up waiting for rank(s) {missing}")
            raise CommError(f"rank {rank}: {what} waits for rank(s) {missing}: {reason}.")

    def fail(self, reason: str) -> None:
        """Wakes everyone who waits, with an error: a rank has failed and will not come."""
        with self._lock:
            self._broken = reason
            self._lock.notify_all()


class InProcessGroup(dist.ProcessGroup):
    """The c10d face of an `Exchange`; DDP and `farandole.comm.Group` both run on it."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(rank, exchange.size)  # type: ignore[call-arg]
        self._exchange = exchange
        self._own_rank = rank

    def getBackendName(self) -> str:  # noqa: N802  (c10d's spelling)
        return "in-process"

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        combine = _combiner(op)
        for tensor in tensors:
            parts = self._swap(tensor, "all_reduce")
            tensor.copy_(reduce(combine, parts))
            if op == dist.ReduceOp.AVG:
                tensor.div_(self._exchange.size)
        return _Done(list(tensors))

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            tensor.copy_(self._swap(tensor, "broadcast")[opts.rootRank])
        return _Done(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for slots, tensor in zip(outputs, inputs, strict=True):
            for slot, part in zip(slots, self._swap(tensor, "all_gather"), strict=True):
                slot.copy_(part)
        return _Done([list(slots) for slots in outputs])

    def barrier(self, opts: Any = None) -> dist.Work:
        self._exchange.swap(self._own_rank, None, "barrier")
        return _Done([])

    def _swap(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Everyone's copy of `tensor`; an error on every rank when shapes or dtypes differ."""
        mine = tensor.detach().clone()
        parts: list[torch.Tensor] = self._exchange.swap(self._own_rank, mine, what)
        for rank, part in enumerate(parts):
            if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                raise CommError(
                    f"{what}: rank 0 has {tuple(parts[0].shape)} {parts[0].dtype}, rank {rank} has "
                    f"{tuple(part.shape)} {part.dtype}. All ranks must pass the same."
                )
        return parts


class _Done(dist.Work):
    """A collective that has already ended."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._future: Future[list[Any]] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[list[Any]]:
        return self._future


def _combiner(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    for known, function in (
        (dist.ReduceOp.SUM, torch.add),
        (dist.ReduceOp.AVG, torch.add),
        (dist.ReduceOp.MIN, torch.minimum),
        (dist.ReduceOp.MAX, torch.maximum),
        (dist.ReduceOp.PRODUCT, torch.mul),
    ):
        if op == known:
            return function
    raise CommError(f"all_reduce knows sum, average, min, max and product, not {op}.")

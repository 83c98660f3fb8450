"""A `Group` seen as a c10d process group, so that DDP runs over any transport."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from farandole.comm.arithmetic import Op
from farandole.errors import CommError


class Collectives(Protocol):
    """The collectives that DDP asks for. A `Group` has them."""

    rank: int
    size: int

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, algorithm: str = "auto"
    ) -> torch.Tensor: ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...

    def barrier(self) -> None: ...


class GroupAdapter(dist.ProcessGroup):
    """What DDP asks of a process group, answered by a group's own collectives."""

    def __init__(self, group: Collectives, transport: str) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self._group = group
        self._transport = transport

    def getBackendName(self) -> str:  # noqa: N802  (c10d's spelling)
        return f"farandole-{self._transport}"

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        op = _op(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        # Done when it returns, in the order of the group's queue. A Work that ended later would
        # need an order of its own beside the queue's.
        for tensor in tensors:
            self._group.all_reduce(tensor, op)
        return _Done(list(tensors))

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            self._group.broadcast(tensor, opts.rootRank)
        return _Done(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for slots, tensor in zip(outputs, inputs, strict=True):
            for slot, part in zip(slots, self._group.all_gather(tensor), strict=True):
                slot.copy_(part)
        return _Done([list(slots) for slots in outputs])

    def barrier(self, opts: Any = None) -> dist.Work:
        self._group.barrier()
        return _Done([])


class _Done(dist.Work):
    """A collective that has already ended."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._future: Future[list[Any]] = Future()
        self._future.set_result(result)

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[list[Any]]:
        return self._future


def _op(op: Any) -> Op:
    names: tuple[tuple[Any, Op], ...] = (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "average"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.PRODUCT, "product"),
    )
    for known, name in names:
        if op == known:
            return name
    raise CommError(f"all_reduce knows sum, average, min, max and product, not {op}.")

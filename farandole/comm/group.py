"""Ranks that talk to each other: a small, metered face over a c10d process group.

Whatever carries the bytes (gloo, NCCL, threads of one process) is a `ProcessGroup`; this class
adds what the rest of the house needs: waiting is measured, failures name the collective and the
rank, and structured values travel as JSON, so nothing is ever unpickled from a socket.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.futures import Future

from farandole.comm.meter import Meter, ring_bytes
from farandole.errors import CommError

Op = Literal["sum", "average", "min", "max", "product"]

_GLOO_THREADS = 2  # that may still hold a tensor of a collective that has ended
_FLAT_BYTES = 64 * 2**20  # tensors are broadcast in flat pieces of about this size


class Group:
    """One rank's end of a group. Every method that communicates must be called by all ranks.

    All of them raise `CommError` when a peer is gone or does not answer within `timeout`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        meter: Meter | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.meter = meter or Meter()
        self._recent: deque[torch.Tensor] = deque(maxlen=_GLOO_THREADS)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """Reduces `tensor` in place over all ranks and returns it."""
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS["sum" if op == "average" else op]  # type: ignore[assignment]
        options.timeout = self.timeout
        flat = tensor.contiguous()
        with self._collective("all_reduce", flat):
            self.process_group.allreduce([flat], options).wait()
        self.meter.add_bytes(ring_bytes(flat.nbytes, self.size))
        if op == "average":
            flat.div_(self.size)
        if flat is not tensor:
            tensor.copy_(flat)
        return tensor

    def all_reduce_future(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """Starts a sum over all ranks in place; the future holds `tensor` when it is done."""
        options = dist.AllreduceOptions()
        options.timeout = self.timeout
        work = self.process_group.allreduce([tensor], options)
        self.meter.add_bytes(ring_bytes(tensor.nbytes, self.size))
        future: Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with the one of rank `source` and returns it."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.timeout = self.timeout
        flat = tensor.contiguous()
        with self._collective("broadcast", flat):
            self.process_group.broadcast([flat], options).wait()
        if self.rank == source and self.size > 1:
            self.meter.add_bytes(flat.nbytes)
        if flat is not tensor:
            tensor.copy_(flat)
        return tensor

    def broadcast_all(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Broadcasts many tensors in few messages: those of one dtype and device travel flat."""
        for batch in _batches(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
            self.broadcast(flat, source)
            pieces = flat.split([tensor.numel() for tensor in batch])
            for tensor, piece in zip(batch, pieces, strict=True):
                tensor.detach().copy_(piece.view_as(tensor))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, in rank order; all must have the same shape and dtype."""
        mine = tensor.contiguous()
        slots = [torch.empty_like(mine) for _ in range(self.size)]
        with self._collective("all_gather", mine):  # with the process group's own timeout
            self.process_group.allgather([slots], [mine]).wait()
        self.meter.add_bytes(mine.nbytes * (self.size - 1))
        return slots

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. It must be JSON: what arrives is parsed, not run."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(t) for t in self.all_gather(torch.tensor([len(text)], dtype=torch.int64))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        parts = self.all_gather(padded)
        return [
            json.loads(part[:length].numpy().tobytes())
            for part, length in zip(parts, lengths, strict=True)
        ]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s `value`, on every rank."""
        text = json.dumps(value).encode() if self.rank == source else b""
        length = self.broadcast(torch.tensor([len(text)], dtype=torch.int64), source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return json.loads(self.broadcast(buffer, source).numpy().tobytes())

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_reduce(torch.zeros(1))

    def drain(self) -> None:
        """Before the interpreter ends: waits until no thread of gloo holds one of our tensors.

        A gloo thread lets go of a tensor shortly after the collective has been waited for. If it
        is the last to do so, it needs the interpreter, and when that has ended by then, the
        process aborts. So the last tensors are kept here until only we hold them.
        """
        deadline = time.monotonic() + 1.0
        while any(t._use_count() > 1 for t in self._recent) and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.001)
        self._recent.clear()
        time.sleep(0.01)  # the same for the callbacks of the last backward pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """A copy of a model whose layers communicate talks over the same connection."""
        return self

    @contextmanager
    def _collective(self, what: str, tensor: torch.Tensor) -> Iterator[None]:
        self._recent.append(tensor)
        try:
            with self.meter.waiting():
                yield
        except RuntimeError as error:
            # Gloo's own words begin with a source file and end with advice; the middle is the fact.
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0]
            raise CommError(
                f"{what} failed on rank {self.rank} of {self.size}: {reason}. Either a "
                f"worker died (see its own output) or it did not answer within "
                f"{self.timeout.total_seconds():g} s (fd.init(timeout=…) allows more)."
            ) from error


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in kinds.values():
        batch: list[torch.Tensor] = []
        batch_bytes = 0
        for tensor in same_kind:
            batch.append(tensor)
            batch_bytes += tensor.nbytes
            if batch_bytes >= _FLAT_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch


_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

"""Ranks that talk to each other: every collective, over whatever carries the bytes.

`direct_collectives` carries a collective out. This class adds their order: collectives run one at a
time, in the order in which the script began them, in its thread or in the background. It also
checks arguments, measures waiting, and has structured values as JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from farandole.comm.arithmetic import Op, check_op
from farandole.comm.collective_scope import CollectiveScope, CollectiveScopes
from farandole.comm.direct_collectives import DirectCollectives
from farandole.comm.gpu.device_average import DeviceAverage
from farandole.comm.gpu.known_all_reduces import KnownAllReduces
from farandole.comm.meter import Meter, ring_bytes
from farandole.comm.process_group import GroupAdapter
from farandole.comm.queue import Handle, Queue
from farandole.comm.tensors import batches, flat_view, put_back
from farandole.comm.transports.base import Transport
from farandole.comm.transports.by_device import ByDevice
from farandole.comm.transports.torch_errors import raise_lost
from farandole.comm.units import Units
from farandole.errors import UserError
from farandole.topology import Topology
from farandole.trace.spans import NO_TRACE, Trace

_PATIENCE_SECONDS = 5.0

P = ParamSpec("P")
T = TypeVar("T")


class Group:
    """One rank's end of a group. Every collective must be called by all ranks, in the same order.

    Collectives raise `CommError`. When the ranks call different things, all of them get it, and the
    group can still be used (for tensors on GPUs not always: see `agreement_beside`); when a rank
    has died or did not answer within `timeout`, the error names it, and the group is broken.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        meter: Meter | None = None,
        trace: Trace = NO_TRACE,
        more_time: str = "fd.init(timeout=…)",
        members: Sequence[int] | None = None,
    ) -> None:
        """`more_time` is what a user sets to make the ranks wait longer."""
        self.meter = meter or Meter()
        self._more_time = more_time
        self._queue = Queue(self.meter)
        self._subgroups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.units: Units | None = None
        """In an elastic job: what makes collectives outlive a lost rank."""
        self.generation = 0
        """How often the group has gone on with other ranks."""
        self._connect(transport, trace, range(transport.size) if members is None else members)
        self.most_ranks = transport.size
        """What the size never exceeds: what is laid out for all ranks has room for so many."""
        self.readers = self.members
        """Who shares data: those of before, as long as not all know that ranks have changed."""

    def _connect(self, transport: Transport, trace: Trace, members: Sequence[int]) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.members = tuple(members)
        """Of each rank, a number that stays when ranks change: its worker's, in an elastic job."""
        self.timeout: timedelta = transport.timeout
        self._scopes = CollectiveScopes(transport, trace, self._more_time)
        self._direct = DirectCollectives(transport, self.meter, self._scopes)
        self._known = self._known_all_reduces(transport)
        self.process_group: dist.ProcessGroup = transport.process_group or GroupAdapter(
            self, transport.name
        )
        """For code of PyTorch's that wants a c10d group, such as DDP."""

    def _known_all_reduces(self, transport: Transport) -> KnownAllReduces | None:
        if not isinstance(transport, ByDevice) or transport.beside is None:
            return None
        scopes = self._scopes
        return KnownAllReduces(transport, transport.beside, self._queue, self.meter, scopes)

    def go_on(self, transport: Transport, members: Sequence[int]) -> None:
        """From now on between other ranks. Whoever holds the group, holds the new one."""
        self.generation += 1
        self._connect(transport, self.trace, members)

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost. Then every collective fails."""
        return self._scopes.is_broken

    @property
    def trace(self) -> Trace:
        """Hears of every collective. It may be replaced between two of them."""
        return self._scopes.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._scopes.trace = trace

    @property
    def topology(self) -> Topology:
        return self.transport.topology

    # In the background

    def start(self, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Begins a collective of this group and returns at once: `start(group.all_reduce, tensor)`.

        Collectives run in the order in which they were begun, those called directly included. The
        tensors belong to the collective until `wait` on the handle has returned.
        """
        return self._queue.start(lambda: collective(*args, **kwargs))

    def average_future(
        self, tensor: torch.Tensor, *, algorithm: str = "auto", last: bool = False
    ) -> Future[torch.Tensor] | DeviceAverage:
        """Starts an average over all ranks in place. It is there when `wait` on the result returns.

        For tensors whose shapes are known to agree, and callers who meter the wait. `last` says
        that the caller has nothing else to do meanwhile: then it is done on return, no thread need
        be woken for it, and what goes wrong, also in those before it, is raised here.
        """
        on_device = self._average_on_device(tensor, algorithm)
        if on_device is not None:
            return on_device

        def average() -> torch.Tensor:
            return self._direct.all_reduce(tensor, "average", algorithm, agreed=True)

        if not last:
            return self._queue.start(average).future
        future: Future[torch.Tensor] = Future()
        future.set_result(self._queue.unmetered(average))
        return future

    def _average_on_device(
        self, tensor: torch.Tensor, algorithm: str = "auto"
    ) -> DeviceAverage | None:
        """For a tensor on a GPU, by the backend's own collective on its own stream, as DDP does it.
        None, and nothing begun, where the host is needed."""
        if not tensor.is_cuda or algorithm not in ("auto", "native"):
            return None
        carrier = self.transport.carrier(tensor)
        if carrier.needs_the_host:
            return None
        options = dist.AllreduceOptions()
        options.timeout = self.timeout
        if carrier.averages_by_itself:
            options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        else:
            tensor.mul_(1.0 / self.size)
        if not self._queue.idle:
            # What was begun before goes first, on this rank as on the others: a backend takes what
            # comes for what is next.
            self._queue.unmetered(lambda: None)
        fail = partial(self._device_failed, carrier.averages_by_itself)
        # The host's side of it: the device goes on by itself.
        with self._scopes.enter("all_reduce", tensor.nbytes, "native", by="c10d"):
            try:
                work = self.process_group.allreduce([tensor], options)
            except RuntimeError as error:
                self._raise_lost(carrier.averages_by_itself, error)
        self.meter.add_bytes(ring_bytes(tensor.nbytes, self.size))
        return DeviceAverage(work, tensor.device, fail, self.meter.activity)

    def _device_failed(self, by_nccl: bool, error: RuntimeError) -> NoReturn:
        with self._scopes.enter("all_reduce", 0, traced=False):
            self._raise_lost(by_nccl, error)

    def _raise_lost(self, by_nccl: bool, error: RuntimeError) -> NoReturn:
        others = [rank for rank in range(self.size) if rank != self.rank]
        raise_lost(others, error, self.timeout, nccl=by_nccl)

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        """Moves the memory of a CPU tensor to where all ranks of this host can reach it.

        From then on all-reduces of it, or of a contiguous part of it, need no copies: large ones
        are two to three times as fast. All ranks must register tensors of the same size together,
        and pass them to all-reduce together. Leaving the context ends it. Where the transport has
        no such memory, or there is not enough, nothing happens.
        """

        def work() -> AbstractContextManager[object]:
            with self._scopes.enter("register", tensor.nbytes):
                return self.transport.register(tensor)

        return self._queue.in_order(work)

    def _run(self, collective: Callable[[], T], changed: torch.Tensor | None = None) -> T:
        """In its turn; in an elastic job also once more, if a rank is lost: `changed` is what the
        collective overwrites."""
        if self.units is None:
            return self._queue.in_order(collective)
        kept = None if changed is None else changed.detach().clone()

        def restore() -> None:
            if changed is not None and kept is not None:
                changed.detach().copy_(kept)

        return self.units.run(lambda: self._queue.in_order(collective), restore, changed)

    # Collectives

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, algorithm: str = "auto"
    ) -> torch.Tensor:
        """Combines `tensor` over all ranks, in place, and returns it: the same bits on every rank.

        `algorithm` is the name of a schedule (`ring`, `halving_doubling`, …), `native` for what
        the transport does by itself, or `auto`.
        """
        known = self._known if self.units is None else None
        if known is not None and known.reduce(tensor, op, algorithm):
            return tensor
        check_op(op, tensor.dtype)
        self._run(lambda: self._direct.all_reduce(tensor, op, algorithm, agreed=False), tensor)
        if known is not None:
            known.learn(tensor, op, algorithm)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """This rank's share of the rows of the reduced `tensor`.

        Rank r gets rows r·n/p … (r+1)·n/p, rounded down: n need not be divisible.
        """
        check_op(op, tensor.dtype)
        if tensor.dim() == 0:
            raise UserError("reduce_scatter divides rows; a tensor without dimensions has none.")
        return self._run(lambda: self._direct.reduce_scatter(tensor, op))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, in rank order. Shapes may differ, dtypes not."""
        return self._run(lambda: self._direct.all_gather(tensor))

    def broadcast(
        self, tensor: torch.Tensor, source: int = 0, *, agreed: bool = False
    ) -> torch.Tensor:
        """Overwrites `tensor` with the one of rank `source` and returns it.

        `agreed`: the ranks are known to call this now, with tensors of the same kind.
        """
        self._require_rank(source)
        return self._run(lambda: self._direct.broadcast(tensor, source, agreed), tensor)

    def broadcast_all(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Broadcasts many tensors in few messages: those of one dtype and device travel flat."""
        for batch in batches(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
            self.broadcast(flat, source)
            pieces = flat.split([tensor.numel() for tensor in batch])
            torch._foreach_copy_(
                [tensor.detach() for tensor in batch],
                [part.view_as(tensor) for tensor, part in zip(batch, pieces, strict=True)],
            )

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gives rank r `tensors[r]` and returns what each rank gave to this one, in rank order.

        Shapes may differ in the first dimension, between any two ranks.
        """
        if len(tensors) != self.size:
            raise UserError(
                f"all_to_all wants one tensor per rank: {self.size}, not {len(tensors)}"
            )
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) > 1:
            raise UserError(
                f"all_to_all wants tensors on one device, not on {' and '.join(devices)}."
            )
        return self._run(lambda: self._direct.all_to_all(tensors))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._run(lambda: self._direct.barrier())

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends to one rank, which must call `receive`."""
        self._require_peer(to)
        flat = flat_view(tensor)
        if flat.numel():
            self._queue.in_order(lambda: self._direct.send(flat, to))
        self.meter.add_bytes(flat.nbytes)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrites `tensor` with what rank `source` sends; shape and dtype must be the same."""
        self._require_peer(source)
        flat = flat_view(tensor)
        if flat.numel():
            self._queue.in_order(lambda: self._direct.receive(flat, source))
        return put_back(flat, tensor)

    # Structured values

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. It must be JSON: what arrives is parsed, not run."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.all_gather(text)]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s `value`, on every rank."""
        return self._run(lambda: self._broadcast_json(value, source))

    def _broadcast_json(self, value: Any, source: int) -> Any:
        text = json.dumps(value).encode() if self.rank == source else b""
        length = self.broadcast(torch.tensor([len(text)], dtype=torch.int64), source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return json.loads(self.broadcast(buffer, source).numpy().tobytes())

    # The group itself

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some of these ranks. All of them, and no others, must call this.

        There this rank's number is its place in `ranks`. Waits and bytes count in this group too.
        """
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UserError(
                f"rank {self.rank} cannot make a subgroup of {list(ranks)}: it must be one of "
                "them, each named once."
            )
        for rank in ranks:
            self._require_rank(rank)

        def make() -> Transport:
            with self._scopes.enter("subgroup", 0):
                return self.transport.subgroup(ranks)

        transport = self._queue.in_order(make)
        subgroup = Group(transport, meter=self.meter, trace=self.trace, more_time=self._more_time)
        self._subgroups.add(subgroup)
        return subgroup

    def close(self) -> None:
        """Before the interpreter ends: gives back what the transport holds.

        What is under way in the background, here and in subgroups, is given a few seconds to end: a
        thread that is still inside a collective when the interpreter goes would abort the process.
        """
        for subgroup in list(self._subgroups):
            subgroup.close()
        # Subgroups come first, because some transports lend them their connections.
        self._queue.settle(_PATIENCE_SECONDS)
        self.transport.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """A copy of a model whose layers communicate talks over the same connection."""
        return self

    def collective(self, what: str, nbytes: int, *, traced: bool = True) -> CollectiveScope:
        """For a `with` around something that all ranks do with the transport itself: it is traced
        and its errors are those of a collective."""
        return self._scopes.enter(what, nbytes, traced=traced)

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UserError(f"there is no rank {rank} in a group of {self.size}.")

    def _require_peer(self, rank: int) -> None:
        self._require_rank(rank)
        if rank == self.rank:
            raise UserError(f"rank {rank} cannot send to or receive from itself.")

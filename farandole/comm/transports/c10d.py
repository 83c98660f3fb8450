"""PyTorch's own process groups: gloo between CPUs anywhere, NCCL between GPUs.

Collectives of GPU tensors go to the backend as they are. On CPU tensors, schedules run over its
point-to-point messages.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from farandole.comm.arithmetic import Op, divide_
from farandole.comm.failure_evidence import StoreBoard, who_is_missing
from farandole.comm.transports.base import ON_GPU
from farandole.comm.transports.messages import Message, PeerLost
from farandole.comm.transports.network import Network
from farandole.comm.transports.torch_errors import raise_lost
from farandole.topology import Topology

_LEAVING = 1 << 20  # a tag that nobody sends to
_AT_ONCE = timedelta(milliseconds=1)
NCCL_PATIENCE = timedelta(seconds=30)
"""How much longer NCCL waits than the hosts do: they can say who is missing, and NCCL only ends the
process."""
_GLOO_THREADS = 2  # that may still hold a tensor of a collective that has ended
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_GLOO_REDUCES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
_NCCL_MULTIPLIES = _GLOO_REDUCES | {torch.bool}
_NCCL_REDUCES = _NCCL_MULTIPLIES | {torch.complex64, torch.complex128}

Underway = tuple[int, dist.Work, torch.Tensor]  # with a peer, and what it holds on to


class C10d(Network):
    """A transport over a `ProcessGroup`.

    In `store`, which its ranks have to themselves, subgroups find each other, and ranks that fail
    tell whom they miss.
    """

    name = "c10d"

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        store: dist.Store,
        topology: Topology | None = None,
        tag: int = 0,
        owned: bool = False,
    ) -> None:
        super().__init__(rank, size, timeout, topology)
        self._process_group = process_group
        self._tag = tag
        self._owned = owned  # made for this transport, and shut down with it
        self._nccl_backend = _nccl_of(process_group)
        self._nccl = self._nccl_backend is not None
        self.averages_by_itself = self._nccl  # gloo has no such operation
        self._board = StoreBoard(store, rank, size)
        self._store = store
        self._made: weakref.WeakSet[C10d] = weakref.WeakSet()
        self._subgroups: Counter[tuple[int, ...]] = Counter()
        self._recent: deque[torch.Tensor] = deque(maxlen=_GLOO_THREADS)
        self._options: dict[Op, dist.AllreduceOptions] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._process_group

    @property
    def has_nccl(self) -> bool:
        """Whether tensors on GPUs go from one to the other, past the memory of the host."""
        return self._nccl

    def place_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        return (ON_GPU,) if self._nccl and tensor.is_cuda else ()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        are_on_gpu = [data.is_cuda for _, data in (*sends, *receives)]
        if self._nccl and are_on_gpu and all(are_on_gpu):
            self._exchange_on_gpu(sends, receives)
            return
        if not self._nccl and any(are_on_gpu):
            # Gloo sends from the memory of the host alone.
            landing = [(peer, into.cpu()) for peer, into in receives]
            self.begin([(peer, data.cpu()) for peer, data in sends], landing)()
            for (_, into), (_, arrived) in zip(receives, landing, strict=True):
                into.copy_(arrived)
            return
        on_host = [[m for m in part if not m[1].is_cuda] for part in (sends, receives)]
        on_gpu = [[m for m in part if m[1].is_cuda] for part in (sends, receives)]
        finish = self.begin(*on_host)
        if any(on_gpu):
            self._exchange_on_gpu(*on_gpu)
        finish()

    def _exchange_on_gpu(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        work = self.queue_on_gpu(sends, receives)
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_lost(_peers(sends, receives), error, (sends or receives)[0][1])
        for _, data in [*sends, *receives]:
            _use_here(data)

    def queue_on_gpu(self, sends: Sequence[Message], receives: Sequence[Message]) -> dist.Work:
        """See `GpuWire`. NCCL carries out what it is given in order, so all of it is given as one:
        two ranks that both send first would otherwise wait for each other."""
        tensor = (sends or receives)[0][1]
        self._process_group._start_coalescing(tensor.device)
        try:
            self.begin(sends, receives)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which the first has led to
                self._process_group._end_coalescing(tensor.device)
            raise
        try:
            return self._process_group._end_coalescing(tensor.device)
        except RuntimeError as error:  # they connect here, when they first meet
            self._raise_lost(_peers(sends, receives), error, tensor)

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        group = self._process_group
        under_way: list[Underway] = []
        for messages, start in ((receives, group.recv), (sends, group.send)):
            for peer, data in messages:
                # Receives are posted first, so that no peer's message waits for its buffer.
                raw = data.view(torch.uint8)
                try:
                    under_way.append((peer, start([raw], peer, self._tag), raw))
                except RuntimeError as error:
                    self._raise_lost([peer], error, raw)
        return partial(self._finish, under_way)

    def _finish(self, under_way: Sequence[Underway]) -> None:
        for peer, work, raw in under_way:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                self._raise_lost([peer], error, raw)
            self._recent.append(raw)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        if claim is not None:
            self.agree(claim)
        if not self.reduces_natively(flat, op):
            super().native_all_reduce(flat, op, None)
            return
        if self._nccl and flat.is_cuda:
            self.nccl_all_reduce(flat, op)
            return
        self._recent.append(flat)
        try:
            _wait(self._process_group.allreduce([flat], self._options_of(op)))
        except RuntimeError as error:
            self._raise_lost(self.others, error, flat)
        divide_(flat, op, self.size)

    def reduces_natively(self, tensor: torch.Tensor, op: Op) -> bool:
        """Whether the backend can: others go by messages, whose numbers are added here."""
        if not (self._nccl and tensor.is_cuda):
            return tensor.dtype in _GLOO_REDUCES
        return tensor.dtype in (_NCCL_MULTIPLIES if op == "product" else _NCCL_REDUCES)

    def nccl_all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """NCCL's own, queued on the current stream. The tensor is contiguous, of any shape, and
        `reduces_natively`."""
        _use_here(tensor)
        try:
            # Not by way of the process group: to find this backend in it takes 4 µs in each call.
            _wait(self._nccl_backend.allreduce([tensor], self._options_of(op)))
        except RuntimeError as error:
            self._raise_lost(self.others, error, tensor)
        divide_(tensor, op, self.size)

    def _options_of(self, op: Op) -> dist.AllreduceOptions:
        if op not in self._options:
            options = self._options[op] = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]  # type: ignore[assignment]
            options.timeout = self.timeout
            # As `dist.all_reduce` has it. NCCL then works on the current stream, where the result
            # is wanted, and two streams need not wait for each other.
            options.asyncOp = False
        return self._options[op]

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        if not flat.is_cuda:
            super().broadcast(flat, source)
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.timeout = self.timeout
        options.asyncOp = False  # as in `_options_of`
        _use_here(flat)
        try:
            # As bytes: NCCL does not know all dtypes.
            _wait(self._process_group.broadcast([flat.view(torch.uint8)], options))
        except RuntimeError as error:
            self._raise_lost([source], error, flat)

    def abort_nccl(self) -> None:
        """Ends what NCCL is doing between these ranks, for good: it may wait for a rank that does
        something else."""
        with contextlib.suppress(RuntimeError):
            self._nccl_backend.abort()

    def beside(self) -> C10d:
        return C10d(
            self._process_group,
            rank=self.rank,
            size=self.size,
            timeout=self.timeout,
            store=self._store,
            topology=self.topology,
            tag=self._tag + 1,
        )

    def subgroup(self, ranks: Sequence[int]) -> C10d:
        return self._between(ranks, nccl=self._nccl)

    def nccl_subgroup(self, ranks: Sequence[int]) -> C10d:
        """As `subgroup`, with NCCL, which needs a GPU for each of these ranks, or a version of it
        that lets them share one."""
        return self._between(ranks, nccl=True)

    def _between(self, ranks: Sequence[int], *, nccl: bool) -> C10d:
        # Named by what its ranks have done together, for they may know of different other groups.
        # The count tells apart subgroups of the same ranks: they would otherwise find each other's
        # keys.
        self._subgroups[tuple(ranks)] += 1
        name = f"{'-'.join(map(str, ranks))}/{self._subgroups[tuple(ranks)]}"
        store = dist.PrefixStore(name, self._store)
        rank, size = list(ranks).index(self.rank), len(ranks)
        try:
            group = new_process_group(store, rank, size, self.timeout, nccl=nccl)
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self.rank]
            raise_lost(others, error, self.timeout, nccl=False)
        made = C10d(group, rank=rank, size=size, timeout=self.timeout, store=store, owned=True)
        self._made.add(made)
        return made

    def blame(self, lost: PeerLost) -> PeerLost:
        return lost.naming(who_is_missing(self._board, self.rank, lost.ranks))

    def close(self) -> None:
        """Waits until no thread of gloo holds one of our tensors.

        A gloo thread lets go of a tensor shortly after the collective has been waited for. If it
        is the last to do so, it needs the interpreter, and when that has ended by then, the
        process aborts. So the last tensors are kept here until only we hold them.
        """
        deadline = time.monotonic() + 1.0
        while any(t._use_count() > 1 for t in self._recent) and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.001)
        self._recent.clear()
        self._shut_down()
        time.sleep(0.01)  # the same for the callbacks of the last backward pass

    def _shut_down(self) -> None:
        """Ends the NCCL of subgroups too: its threads must not outlive the interpreter."""
        for subgroup in list(self._made):
            subgroup._shut_down()
        if self._owned and self._nccl:
            self._owned = False
            with contextlib.suppress(RuntimeError):
                self._process_group.abort()

    def interrupt(self) -> None:
        # Gloo's connections stay open as long as the process lives, and a peer that waits for this
        # rank would do so to the end of its own timeout. A receive that times out closes them all:
        # there is no other way to ask gloo for it.
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in self.others:  # one that lives, whichever that is
            with contextlib.suppress(RuntimeError):
                self._process_group.recv([nothing], peer, self._tag + _LEAVING).wait(_AT_ONCE)

    def abandon(self) -> None:
        self.interrupt()
        self.close()

    def _raise_lost(
        self, ranks: Sequence[int], error: RuntimeError, tensor: torch.Tensor
    ) -> NoReturn:
        raise_lost(ranks, error, self.timeout, nccl=self._nccl and tensor.is_cuda)


def _peers(*messages: Sequence[Message]) -> list[int]:
    return sorted({peer for part in messages for peer, _ in part})


def _nccl_of(process_group: dist.ProcessGroup) -> Any:
    cuda = torch.device("cuda")
    if cuda not in process_group._device_types:
        return None
    backend = process_group._get_backend(cuda)
    return backend if backend.name() == "nccl" else None


def _wait(work: dist.Work | None) -> None:
    """For the end of what was asked for with `asyncOp = False`: NCCL then returns nothing."""
    if work is not None:
        work.wait()


def _use_here(flat: torch.Tensor) -> None:
    """Its memory is used by the current stream, in a background thread not the one it was made
    on."""
    # By its number: to find out which GPU is current takes longer than all the rest.
    device = flat.get_device()
    # On the default stream an all-reduce is like any other operation there: whoever has made the
    # tensor on another one has to record that, and knows.
    if torch._C._cuda_getCurrentRawStream(device):
        flat.record_stream(torch.cuda.current_stream(device))


def new_process_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, nccl: bool = False
) -> dist.ProcessGroup:
    """What `dist.new_group` makes, but that wants a default group, sorts the ranks, and finds them
    by the number of groups that each has made before: ranks for which that differs wait for each
    other in vain. Tensors on GPUs go by NCCL if it is asked for, else by gloo."""
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + NCCL_PATIENCE
        fast = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, fast)
        group._set_default_backend(kinds.NCCL)
        if size > 2:
            # NCCL connects all of them for the first message between two, and would wait for those
            # that have nothing to say.
            fast.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    else:
        group._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
    return group

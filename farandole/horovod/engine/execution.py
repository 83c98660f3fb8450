"""Carries out what the ranks have agreed on: the tensors of a response, over one transport.

Small tensors are reduced together, in a buffer that all ranks of a host can reach. A rank that has
joined takes part in all-reduces with what changes nothing, and keeps nothing; nothing else is
agreed on while there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.choice import choose
from farandole.comm.group import Group
from farandole.comm.tensors import flat_view, put_back
from farandole.comm.transports.base import Transport
from farandole.horovod.engine.adasum import adasum_
from farandole.horovod.engine.gpus import GpuLinks
from farandole.horovod.engine.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    Request,
)
from farandole.horovod.engine.table import ADASUM, Item, Response
from farandole.horovod.engine.work import Work

_LEAST_BUFFER_BYTES = 2**20


class Executor:
    """Of one engine. The group's transport carries memory of the host; what is on GPUs goes by
    `gpus`, or, if there is no such way, is copied to the host and back."""

    def __init__(self, group: Group, gpus: GpuLinks | None = None) -> None:
        self._group = group
        self._host: Transport = group.transport
        self._transport = self._host  # of the tensors at hand
        self._gpus = gpus
        self._between_gpus: Transport | None = None
        self._staged = True
        self._gpu: int | None = None  # of this rank, as far as is known
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, AbstractContextManager[object]]] = {}

    def carry_out(self, response: Response, works: Sequence[Work | None]) -> None:
        """`works[i]` is this rank's part of item i; None where it has joined.

        When it returns, the outputs are there.
        """
        # Any thread may drive a round, and one that has chosen no GPU works on the first.
        with self._on_gpu(response.items[0].like.device, works):
            self._carry_out(response, works)

    def _carry_out(self, response: Response, works: Sequence[Work | None]) -> None:
        kind = response.items[0].like.kind
        self._choose_transport(response.items[0].like.device)
        if self._transport.size == 1 and kind != ALLTOALL:
            _alone(response, works)
            if response.items[0].like.device == "cuda":
                torch.cuda.current_stream().synchronize()
            return
        does: dict[str, Callable[[Response, Sequence[Work | None]], None]] = {
            ALLREDUCE: self._allreduce,
            ALLGATHER: self._allgather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._alltoall,
            REDUCESCATTER: self._reducescatter,
        }
        if kind in does:
            with self._group.collective(f"{kind} of {response.items[0].name!r}", 0):
                does[kind](response, works)
        if not self._staged:
            torch.cuda.current_stream().synchronize()  # the outputs are there when we say so

    def remember_gpu(self) -> None:
        """In a thread of the script: what this rank takes part with, where it has no tensors, lies
        on the GPU that is current there."""
        if torch.cuda.is_initialized():
            self._gpu = torch.cuda.current_device()

    def _on_gpu(self, device: str, works: Sequence[Work | None]) -> AbstractContextManager[object]:
        if device != "cuda":
            return nullcontext()
        given = next((work.inputs[0] for work in works if work is not None and work.inputs), None)
        if given is not None and given.is_cuda:
            self._gpu = given.get_device()
        return nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)

    def _choose_transport(self, device: str) -> None:
        """All ranks come here together, so that they can connect their GPUs when they must."""
        if device == "cuda" and self._gpus is not None and self._host.size > 1:
            links, self._gpus = self._gpus, None
            self._between_gpus = links.connect(self._host)
        between = self._between_gpus if device == "cuda" else None
        self._staged = between is None
        self._transport = between or self._host

    def offer(self, work: Work) -> Callable[[str], list[str]] | None:
        """A way to reduce a tensor along with its announcement, if it is as simple as most are:
        one, in memory, in a row, without factors."""
        request = work.request
        source = work.inputs[0] if work.inputs else None
        if (
            source is None
            or request.kind != ALLREDUCE
            or len(work.inputs) != 1
            or request.device != "cpu"
            or (request.prescale, request.postscale) != (1.0, 1.0)
            or is_whole_average(request.op, source.dtype)
            or request.op == ADASUM
            or not source.is_contiguous()
            or self._host.size == 1  # a process set of one rank: there is nothing to reduce
        ):
            return None
        mine, target = flat_view(source), flat_view(work.outputs[0])
        if source is work.outputs[0]:
            target = mine
        self._choose_transport(request.device)
        transport, op = self._transport, _op_for(request.op, source.dtype)
        algorithm = self._algorithm(mine)
        return lambda claim: transport.reduce_if_agreed(claim, mine, target, op, algorithm)

    def close(self) -> None:
        for _, registered in self._buffers.values():
            registered.__exit__(None, None, None)
        self._buffers.clear()

    # All-reduce

    def _allreduce(self, response: Response, works: Sequence[Work | None]) -> None:
        like = response.items[0].like
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for item, work in zip(response.items, works, strict=True):
            given = _inputs(item, work)
            inputs += given
            outputs += _outputs(work, given)
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
            chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype == dtype]
            self._reduce_one_kind(like, [inputs[i] for i in chosen], [outputs[i] for i in chosen])

    def _reduce_one_kind(
        self, like: Request, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        # Asked of the request: who has joined takes part from memory, but by the same way.
        if len(inputs) == 1 and not (self._staged and like.device == "cuda"):
            source, target = inputs[0], outputs[0]
            if source is not target:
                target.copy_(source)
            flat = flat_view(target)
            self._reduce_(flat, like, [flat.numel()])
            put_back(flat, target)
            return
        lengths = [tensor.numel() for tensor in inputs]
        buffer = self._buffer(inputs[0], sum(lengths))
        views = [
            part.view(tensor.shape)
            for part, tensor in zip(buffer.split(lengths), inputs, strict=True)
        ]
        torch._foreach_copy_(views, inputs)
        self._reduce_(buffer, like, lengths)
        torch._foreach_copy_(outputs, views)

    def _reduce_(self, flat: torch.Tensor, like: Request, lengths: Sequence[int]) -> None:
        """In place. Numbers that are not floating are averaged by whole division."""
        scale_(flat, like.prescale)
        if like.op == ADASUM:
            adasum_(self._transport, flat, lengths)
        elif is_whole_average(like.op, flat.dtype):
            wide = flat.long()  # the sum may not fit where the average does
            self._transport.all_reduce(wide, "sum", self._algorithm(wide), None)
            flat.copy_(wide.div_(self._transport.size, rounding_mode="trunc"))
        else:
            op = _op_for(like.op, flat.dtype)
            self._transport.all_reduce(flat, op, self._algorithm(flat), None)
        scale_(flat, like.postscale)
        self._group.meter.add_bytes(flat.nbytes)

    def _algorithm(self, flat: torch.Tensor) -> str:
        return choose(self._transport, flat.nbytes, "auto", cuda=flat.is_cuda)

    def _buffer(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """Room for so many numbers. All ranks ask for the same, in the same order."""
        if like.is_cuda and not self._staged:
            return like.new_empty(length)
        found = self._buffers.get(like.dtype)
        if found is None or found[0].numel() < length:
            if found is not None:
                found[1].__exit__(None, None, None)
            wanted = max(length * like.itemsize, _LEAST_BUFFER_BYTES)
            room = 1 << (wanted - 1).bit_length()
            fresh = torch.empty(room // like.itemsize, dtype=like.dtype)
            found = fresh, self._transport.register(fresh)
            found[1].__enter__()
            self._buffers[like.dtype] = found
        return found[0][:length]

    # The others. Their tensors go one by one, and every rank is there.

    def _allgather(self, response: Response, works: Sequence[Work | None]) -> None:
        item, work = _only(response, works)
        for index, mine in enumerate(_inputs(item, work)):
            like = item.like.shapes[index]
            rows = [request.shapes[index][0] for request in item.requests if request]
            width = _width(like)
            flat = self._transport.all_gather(
                flat_view(self._carried(mine)), [count * width for count in rows]
            )
            gathered = flat.view(sum(rows), *like[1:])
            work.outputs.append(gathered.to(mine.device))

    def _broadcast(self, response: Response, works: Sequence[Work | None]) -> None:
        item, work = _only(response, works)
        root = item.like.root
        inputs = _inputs(item, work)
        for mine, target in zip(inputs, _outputs(work, inputs), strict=True):
            if self._transport.rank == root and target is not mine:
                target.copy_(mine)
            carried = self._carried(target)
            flat = flat_view(carried)
            self._transport.broadcast(flat, root)
            put_back(flat, carried)
            if carried is not target:
                target.copy_(carried)

    def _alltoall(self, response: Response, works: Sequence[Work | None]) -> None:
        item, work = _only(response, works)
        (mine,) = _inputs(item, work)
        taken = [request.splits[self._transport.rank] for request in item.requests if request]
        carried = self._carried(mine)
        row = tuple(item.like.shapes[0][1:])
        sends = [flat_view(part) for part in carried.split(list(work.request.splits))]
        received = carried.new_empty((sum(taken), *row))
        self._transport.all_to_all(sends, [flat_view(part) for part in received.split(taken)])
        work.outputs += [received.to(mine.device), torch.tensor(taken, dtype=torch.int32)]

    def _reducescatter(self, response: Response, works: Sequence[Work | None]) -> None:
        item, work = _only(response, works)
        like = item.like
        for index, mine in enumerate(_inputs(item, work)):
            shape = like.shapes[index]
            rows = shares(shape[0], self._transport.size)
            width = _width(shape)
            flat = flat_view(self._carried(mine))
            if like.prescale != 1.0:
                flat = scale_(flat.clone(), like.prescale)
            counts = [count * width for count in rows]
            if is_whole_average(like.op, flat.dtype):
                wide = self._transport.reduce_scatter(flat.long(), counts, "sum")
                wide.div_(self._transport.size, rounding_mode="trunc")
                result = wide.to(flat.dtype)
            else:
                op = _op_for(like.op, flat.dtype)
                result = self._transport.reduce_scatter(flat, counts, op)
            scale_(result, like.postscale)
            own = result.view(rows[self._transport.rank], *shape[1:])
            work.outputs.append(own.to(mine.device))

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._staged and tensor.is_cuda else tensor


def shares(rows: int, size: int) -> list[int]:
    """How many rows of a reduce-scatter each rank gets: the first ones get those left over."""
    each, over = divmod(rows, size)
    return [each + (rank < over) for rank in range(size)]


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """In place; whole numbers are cut off towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double().mul_(factor))


def _op_for(op: str, dtype: torch.dtype) -> Op:
    if dtype == torch.bool:
        return "max" if op in ("sum", "max") else "min"  # any, all
    return cast(Op, op)


def is_whole_average(op: str, dtype: torch.dtype) -> bool:
    """An average of whole numbers, which is cut off towards zero."""
    return op == "average" and not (dtype.is_floating_point or dtype.is_complex)


def _only(response: Response, works: Sequence[Work | None]) -> tuple[Item, Work]:
    """Of what is done one by one, by every rank."""
    (item,), (work,) = response.items, works
    assert work is not None
    return item, work


def _inputs(item: Item, work: Work | None) -> list[torch.Tensor]:
    """This rank's tensors, or such that change nothing."""
    if work is not None:
        if work.ready is not None:
            work.ready.synchronize()
        return [tensor.detach() for tensor in work.inputs]
    like = item.like
    dtypes = [cast(torch.dtype, getattr(torch, name)) for name in like.dtypes]
    return [
        torch.full(shape, _neutral(like.op, dtype), dtype=dtype, device=like.device)
        for shape, dtype in zip(like.shapes, dtypes, strict=True)
    ]


def _outputs(work: Work | None, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Where the results go: the inputs themselves where it is done in place."""
    if work is None:
        return inputs
    triples = zip(inputs, work.inputs, work.outputs, strict=True)
    return [mine if out is given else out.detach() for mine, given, out in triples]


def _neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    if op == "product":
        return 1
    if op in ("min", "max"):
        if dtype == torch.bool:
            return op == "min"
        if dtype.is_floating_point:
            return float("inf") if op == "min" else float("-inf")
        limits = torch.iinfo(dtype)
        return limits.max if op == "min" else limits.min
    return 0


def _width(shape: Sequence[int]) -> int:
    """Numbers in a row."""
    return int(torch.Size(shape[1:]).numel())


def _alone(response: Response, works: Sequence[Work | None]) -> None:
    """With nobody else there is nothing to combine; only the factors are left."""
    for item, work in zip(response.items, works, strict=True):
        if work is None:
            continue
        if work.ready is not None:
            work.ready.synchronize()  # what the script computes may be on another stream
        like = item.like
        makes_outputs = like.kind in (ALLGATHER, REDUCESCATTER)
        for index, mine in enumerate(tensor.detach() for tensor in work.inputs):
            if makes_outputs:
                work.outputs.append(mine.clone())
            elif work.outputs[index] is not work.inputs[index]:
                work.outputs[index].detach().copy_(mine)
            target = work.outputs[index].detach()
            scale_(target, like.prescale)
            scale_(target, like.postscale)

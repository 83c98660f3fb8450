"""All-reduce, of one tensor or of several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine.requests import ALLREDUCE
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.handles import Handle, first, tensor_or_error, tensors_or_error
from farandole.horovod.torch.operations import (
    ReduceOp,
    chosen_op,
    reduce_async,
    require_linear,
    with_gradient,
)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# One


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `allreduce` and returns a handle. The tensor must not be written meanwhile."""
    return _allreduce_async(
        tensor, chosen_op(average, op), name, (prescale_factor, postscale_factor), process_set
    )


def _allreduce_async(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    quiet: bool = False,
) -> Handle:
    tensor_or_error(tensor, "allreduce")
    output = tensor if in_place else _room_for(tensor)
    return reduce_async(
        ALLREDUCE, [tensor], [output], name, op, scales, process_set, first, quiet=quiet
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `allreduce_` and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    return _allreduce_async(
        tensor, chosen_op(average, op), name, scales, process_set, in_place=True
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines `tensor` over all ranks, in place, and returns it."""
    scales = (prescale_factor, postscale_factor)
    handle = _allreduce_async(
        tensor, chosen_op(average, op), name, scales, process_set, in_place=True, quiet=True
    )
    result: torch.Tensor = handle.wait()
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        op: ReduceOp,
        name: str | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.op, ctx.name, ctx.scales, ctx.process_set = op, name, scales, process_set
        handle = _allreduce_async(tensor, op, name, scales, process_set, quiet=True)
        result: torch.Tensor = handle.wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        require_linear(ctx.op)
        name = f"{ctx.name}.grad" if ctx.name is not None else None
        grad = _AllReduce.apply(grad, ctx.op, name, ctx.scales, ctx.process_set)
        return grad, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`tensor` combined over all ranks, as a new tensor; the average if nothing else is said.

    Differentiable: the gradient is combined in the same way.
    """
    chosen = chosen_op(average, op)
    scales = (prescale_factor, postscale_factor)
    if tensor_or_error(tensor, "allreduce").is_sparse:
        if scales != (1.0, 1.0) or compression is not Compression.none:
            raise UserError("a sparse tensor is sent as it is: without factors and compression.")
        from farandole.horovod.torch.sparse import sparse_allreduce  # it stands on this file

        return sparse_allreduce(tensor, name, chosen, process_set)
    small, context = compression.compress(tensor)
    if small.requires_grad and torch.is_grad_enabled():
        reduced = _AllReduce.apply(small, chosen, name, scales, process_set)
    else:
        reduced = _allreduce_async(small, chosen, name, scales, process_set, quiet=True).wait()
    return compression.decompress(reduced, context)


# Several at once


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce` and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce_async(tensors, chosen_op(average, op), name, scales, process_set)


def _grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    quiet: bool = False,
) -> Handle:
    found = tensors_or_error(tensors, "grouped_allreduce")
    outputs = found if in_place else [_room_for(tensor) for tensor in found]
    return reduce_async(
        ALLREDUCE,
        found,
        list(outputs),
        name,
        op,
        scales,
        process_set,
        list,
        quiet=quiet,
        grouped=True,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce_` and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce_async(
        tensors, chosen_op(average, op), name, scales, process_set, in_place=True
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combines all tensors over all ranks, in place, in one go; returns them."""
    scales = (prescale_factor, postscale_factor)
    handle = _grouped_allreduce_async(
        tensors, chosen_op(average, op), name, scales, process_set, in_place=True, quiet=True
    )
    result: list[torch.Tensor] = handle.wait()
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Each tensor combined over all ranks, as new tensors, in one go. Differentiable."""
    chosen = chosen_op(average, op)
    scales = (prescale_factor, postscale_factor)
    found = tensors_or_error(tensors, "grouped_allreduce")
    pairs = [compression.compress(tensor) for tensor in found]

    def reduce(given: Sequence[torch.Tensor], suffix: str = "") -> list[torch.Tensor]:
        called = f"{name}{suffix}" if name is not None else None
        handle = _grouped_allreduce_async(given, chosen, called, scales, process_set, quiet=True)
        result: list[torch.Tensor] = handle.wait()
        return result

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        require_linear(chosen)
        return reduce([gradient.contiguous() for gradient in gradients], ".grad")

    reduced = with_gradient(reduce, back, [small for small, _ in pairs])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]

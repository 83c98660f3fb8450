"""Collectives that combine numbers: all-reduce and reduce-scatter, of one tensor or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch

from farandole.errors import UserError, nearest
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.requests import ALLREDUCE, REDUCESCATTER
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.handles import (
    Handle,
    first,
    submit,
    synchronize,
    tensor_or_error,
    tensors_or_error,
)


class ReduceOp(StrEnum):
    """What is done with the numbers of the ranks."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_LINEAR = (Average, Sum)


def chosen_op(average: bool | None, op: str | None) -> ReduceOp:
    """From Horovod's old argument and its new one."""
    if average is not None:
        if op is not None:
            raise UserError(f"give op={op} or average={average}, not both; average is the old way.")
        return Average if average else Sum
    try:
        return ReduceOp(op) if op is not None else Average
    except ValueError:
        known = [member.value for member in ReduceOp]
        raise UserError(f"no reduction {op!r}. {nearest(str(op), known)}") from None


def _check(tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype == torch.bool and op in (Average, Adasum):
            raise UserError(f"a bool has no {op}; use Sum or Max for any, Min or Product for all.")
        if dtype.is_complex and op in (Min, Max, Adasum):
            raise UserError(f"complex numbers have no {op}.")
        if op == Adasum and not dtype.is_floating_point:
            raise UserError(f"Adasum is for floating-point gradients, not {dtype}.")


def _reduce_async(
    kind: str,
    tensors: list[torch.Tensor],
    outputs: list[torch.Tensor] | None,
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    finish: Any,
    *,
    quiet: bool = False,
) -> Handle:
    _check(tensors, op)
    return submit(
        kind,
        name,
        tensors,
        outputs,
        process_set,
        finish,
        quiet=quiet,
        op=op.value,
        prescale=float(scales[0]),
        postscale=float(scales[1]),
    )


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# All-reduce


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
    return _reduce_async(
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
        _require_linear(ctx.op)
        name = f"{ctx.name}.grad" if ctx.name is not None else None
        grad = _AllReduce.apply(grad, ctx.op, name, ctx.scales, ctx.process_set)
        return grad, None, None, None, None


def _require_linear(op: ReduceOp) -> None:
    if op not in _LINEAR:
        raise UserError(f"{op} has no gradient here; Average and Sum have one.")


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
    return _reduce_async(
        ALLREDUCE, found, list(outputs), name, op, scales, process_set, list, quiet=quiet
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


class _Grouped(torch.autograd.Function):
    """Several tensors in, several out. `does` is the collective; `undoes` makes of the gradients of
    the outputs those of the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        does: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        undoes: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.undoes = undoes
        return tuple(does(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.undoes(gradients))


def wants_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def with_gradient(
    does: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    undoes: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """`does(tensors)`, through which gradients flow back by `undoes`."""
    return (
        list(_Grouped.apply(does, undoes, *tensors)) if wants_gradient(tensors) else does(tensors)
    )


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
        _require_linear(chosen)
        return reduce([gradient.contiguous() for gradient in gradients], ".grad")

    reduced = with_gradient(reduce, back, [small for small, _ in pairs])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


# Sparse


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts an all-reduce of a sparse tensor. What it returns is called to wait for the result.

    Every rank's entries are gathered; those at the same place add up.
    """
    from farandole.horovod.torch.movements import allgather_async

    chosen = chosen_op(None, op)
    _require_linear_sparse(chosen)
    if not tensor_or_error(tensor, "sparse_allreduce").is_sparse:
        raise UserError(f"sparse_allreduce wants a sparse COO tensor, not a {tensor.layout} one.")
    entries = tensor.coalesce()
    indices = allgather_async(
        entries.indices().t().contiguous(),
        f"{name}.indices" if name is not None else None,
        process_set,
    )
    values = allgather_async(
        entries.values(), f"{name}.values" if name is not None else None, process_set
    )

    def finish() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        # Checked, since nobody has compared the ranks' shapes: only what was gathered has one.
        whole = torch.sparse_coo_tensor(
            all_indices.t(), all_values, tensor.shape, check_invariants=True
        ).coalesce()
        if chosen == Average:
            floats = all_values.is_floating_point() or all_values.is_complex()
            whole.values().div_(process_set.size() or 1, rounding_mode=None if floats else "trunc")
        return whole

    return finish


def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A sparse tensor combined over all ranks, as a new sparse tensor: the average or the sum."""
    return sparse_allreduce_async(tensor, name, op, process_set)()


def _require_linear_sparse(op: ReduceOp) -> None:
    if op not in _LINEAR:
        raise UserError(f"sparse tensors can be combined by Average and Sum, not by {op}.")


# Reduce-scatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `reducescatter` and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter_async([tensor], name, op, scales, process_set, first)


def _reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: str,
    scales: tuple[float, float],
    process_set: ProcessSet,
    finish: Any,
    *,
    quiet: bool = False,
) -> Handle:
    chosen = chosen_op(None, op)
    found = tensors_or_error(tensors, "reducescatter")
    if chosen == Adasum:
        raise UserError("Adasum needs whole tensors: use allreduce.")
    for tensor in found:
        if tensor.dim() == 0:
            raise UserError("reducescatter divides rows; a tensor without dimensions has none.")
    return _reduce_async(
        REDUCESCATTER, found, None, name, chosen, scales, process_set, finish, quiet=quiet
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's share of the rows of `tensor` combined over all ranks.

    If the rows cannot be shared evenly, the first ranks get one more. Differentiable.
    """
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `grouped_reducescatter` and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter_async(tensors, name, op, scales, process_set, list)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of each tensor, in one go. Differentiable."""
    from farandole.horovod.torch.movements import grouped_allgather

    scales = (prescale_factor, postscale_factor)
    found = tensors_or_error(tensors, "reducescatter")
    pairs = [compression.compress(tensor) for tensor in found]

    def reduce(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handle = _reducescatter_async(given, name, op, scales, process_set, list, quiet=True)
        result: list[torch.Tensor] = handle.wait()
        return result

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # As Horovod has it: of a sum, each rank's gradient counts as that of an average does.
        _require_linear(chosen_op(None, op))
        size = process_set.size() or 1
        factor = scales[0] * scales[1] * (size if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return grouped_allgather(scaled, f"{name}.grad" if name is not None else None, process_set)

    scattered = with_gradient(reduce, back, [small for small, _ in pairs])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(scattered, pairs, strict=True)
    ]

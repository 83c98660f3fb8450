"""What is done with the ranks' numbers: the operations, and what all reductions have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch

from farandole.errors import UserError, nearest
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.torch.handles import Handle, submit


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

LINEAR = (Average, Sum)


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


def reduce_async(
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
    grouped: bool = False,
    without: tuple[str, ...] = (),
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
        grouped=grouped,
        op=op.value,
        prescale=float(scales[0]),
        postscale=float(scales[1]),
        without=without,
    )


def require_linear(op: ReduceOp) -> None:
    if op not in LINEAR:
        raise UserError(f"{op} has no gradient here; Average and Sum have one.")


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

"""All-reduce of dense tensors, one or several at once: what the public calls have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine.requests import ALLREDUCE
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.handles import Handle, first, tensor_or_error, tensors_or_error
from farandole.horovod.torch.operations import (
    Average,
    ReduceOp,
    chosen_op,
    reduce_async,
    require_linear,
    with_gradient,
)


class Reduction(NamedTuple):
    """How tensors are combined, under which name, and between which ranks. `without`: of gradients,
    the variables that have none; the ranks must agree on them."""

    op: ReduceOp
    name: str | None
    scales: tuple[float, float]
    process_set: ProcessSet
    without: tuple[str, ...] = ()

    @classmethod
    def asked(
        cls,
        average: bool | None,
        name: str | None,
        op: str | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Reduction:
        """From the arguments that all public calls have. Raises `UserError`."""
        scales = (prescale_factor, postscale_factor)
        return cls(chosen_op(average, op), name, scales, process_set)

    @classmethod
    def average(cls, name: str | None, process_set: ProcessSet = global_process_set) -> Reduction:
        return cls(Average, name, (1.0, 1.0), process_set)

    def of_gradient(self) -> Reduction:
        """Raises `UserError` where the gradient is not combined in the same way."""
        require_linear(self.op)
        return self._replace(name=f"{self.name}.grad" if self.name is not None else None)


def start_one(
    tensor: torch.Tensor, how: Reduction, *, in_place: bool = False, quiet: bool = False
) -> Handle:
    """The result of the handle is the tensor."""
    tensor_or_error(tensor, "allreduce")
    outputs = [tensor if in_place else _empty_like(tensor)]
    return reduce_async(ALLREDUCE, [tensor], outputs, *_ordered(how), first, quiet=quiet)


def start_group(
    tensors: Sequence[torch.Tensor],
    how: Reduction,
    *,
    in_place: bool = False,
    quiet: bool = False,
) -> Handle:
    """The result of the handle is a list of the tensors."""
    found = tensors_or_error(tensors, "grouped_allreduce")
    outputs = list(found) if in_place else [_empty_like(tensor) for tensor in found]
    return reduce_async(
        ALLREDUCE,
        found,
        outputs,
        *_ordered(how),
        list,
        quiet=quiet,
        grouped=True,
        without=how.without,
    )


def reduce_one(
    tensor: torch.Tensor, how: Reduction, compression: type[Compressor] = Compression.none
) -> torch.Tensor:
    """A new tensor. Differentiable."""
    small, context = compression.compress(tensor)
    if small.requires_grad and torch.is_grad_enabled():
        reduced = _AllReduce.apply(small, how)
    else:
        reduced = start_one(small, how, quiet=True).wait()
    return compression.decompress(reduced, context)


def reduce_group(
    tensors: Sequence[torch.Tensor],
    how: Reduction,
    compression: type[Compressor] = Compression.none,
) -> list[torch.Tensor]:
    """New tensors. Differentiable."""
    found = tensors_or_error(tensors, "grouped_allreduce")
    pairs = [compression.compress(tensor) for tensor in found]

    def reduce(given: Sequence[torch.Tensor], how: Reduction = how) -> list[torch.Tensor]:
        result: list[torch.Tensor] = start_group(given, how, quiet=True).wait()
        return result

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return reduce([gradient.contiguous() for gradient in gradients], how.of_gradient())

    reduced = with_gradient(reduce, back, [small for small, _ in pairs])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


class _AllReduce(torch.autograd.Function):
    """Can be differentiated twice: the gradient goes through it, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = start_one(tensor, how, quiet=True).wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _AllReduce.apply(grad, ctx.how.of_gradient()), None


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    # Not `empty_like`: the output is contiguous, whatever the strides of the input are.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _ordered(how: Reduction) -> tuple[str | None, ReduceOp, tuple[float, float], ProcessSet]:
    return how.name, how.op, how.scales, how.process_set

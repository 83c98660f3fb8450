"""Reduce-scatter: each rank gets its share of the rows of what was combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine.requests import REDUCESCATTER
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.handles import Handle, first, tensors_or_error
from farandole.horovod.torch.movements import grouped_allgather
from farandole.horovod.torch.operations import (
    Adasum,
    Average,
    Sum,
    chosen_op,
    reduce_async,
    require_linear,
    with_gradient,
)


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
    grouped: bool = False,
    quiet: bool = False,
) -> Handle:
    chosen = chosen_op(None, op)
    found = tensors_or_error(tensors, "reducescatter")
    if chosen == Adasum:
        # As in Horovod: not as a wrong argument, but as something that the operation cannot do.
        raise HorovodInternalError("reducescatter: Adasum needs whole tensors. Use allreduce.")
    for tensor in found:
        if tensor.dim() == 0:
            raise UserError("reducescatter divides rows; a tensor without dimensions has none.")
    return reduce_async(
        REDUCESCATTER,
        found,
        None,
        name,
        chosen,
        scales,
        process_set,
        finish,
        quiet=quiet,
        grouped=grouped,
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
    scales = (prescale_factor, postscale_factor)
    (result,) = _reducescatter([tensor], name, compression, op, process_set, scales, grouped=False)
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
    return _reducescatter_async(tensors, name, op, scales, process_set, list, grouped=True)


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
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, compression, op, process_set, scales, grouped=True)


def _reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    compression: type[Compressor],
    op: str,
    process_set: ProcessSet,
    scales: tuple[float, float],
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    found = tensors_or_error(tensors, "reducescatter")
    pairs = [compression.compress(tensor) for tensor in found]

    def reduce(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handle = _reducescatter_async(
            given, name, op, scales, process_set, list, grouped=grouped, quiet=True
        )
        result: list[torch.Tensor] = handle.wait()
        return result

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # As Horovod has it: of a sum, each rank's gradient counts as that of an average does.
        require_linear(chosen_op(None, op))
        size = process_set.size() or 1
        factor = scales[0] * scales[1] * (size if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return grouped_allgather(scaled, f"{name}.grad" if name is not None else None, process_set)

    scattered = with_gradient(reduce, back, [small for small, _ in pairs])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(scattered, pairs, strict=True)
    ]

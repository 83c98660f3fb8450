"""All-reduce, of one tensor or of several at once: Horovod's eight calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.dense_reductions import (
    Reduction,
    reduce_group,
    reduce_one,
    start_group,
    start_one,
)
from farandole.horovod.torch.handles import Handle, tensor_or_error
from farandole.horovod.torch.sparse import sparse_allreduce


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    return start_one(tensor, how)


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    return start_one(tensor, how, in_place=True)


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = start_one(tensor, how, in_place=True, quiet=True).wait()
    return result


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    if tensor_or_error(tensor, "allreduce").is_sparse:
        if how.scales != (1.0, 1.0) or compression is not Compression.none:
            raise UserError("a sparse tensor is sent as it is: without factors and compression.")
        return sparse_allreduce(tensor, name, how.op, process_set)
    return reduce_one(tensor, how, compression)


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    return start_group(tensors, how)


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    return start_group(tensors, how, in_place=True)


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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[torch.Tensor] = start_group(tensors, how, in_place=True, quiet=True).wait()
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
    how = Reduction.asked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduce_group(tensors, how, compression)

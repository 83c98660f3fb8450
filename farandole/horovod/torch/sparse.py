"""All-reduce of sparse tensors: all ranks' entries are gathered, and those at one place add up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.errors import UserError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.handles import synchronize, tensor_or_error
from farandole.horovod.torch.movements import allgather_async
from farandole.horovod.torch.operations import LINEAR, Average, ReduceOp, chosen_op
from farandole.serialization.sparse import checked_sparse


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts an all-reduce of a sparse tensor. What it returns is called to wait for the result.

    Every rank's entries are gathered; those at the same place add up.
    """
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
        whole = checked_sparse(all_indices.t(), all_values, tensor.shape).coalesce()
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
    if op not in LINEAR:
        raise UserError(f"sparse tensors can be combined by Average and Sum, not by {op}.")

"""Collectives that move numbers: all-gather, broadcast, all-to-all; and those that move nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine.requests import ALLGATHER, ALLTOALL, BARRIER, BROADCAST, Request
from farandole.horovod.engine.work import Work
from farandole.horovod.torch.dense_reductions import Reduction, reduce_group, reduce_one
from farandole.horovod.torch.handles import (
    Finish,
    Handle,
    first,
    submit,
    tensor_or_error,
    tensors_or_error,
)
from farandole.horovod.torch.operations import with_gradient

# All-gather


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts `allgather` and returns a handle."""
    return _allgather_async([tensor], name, process_set, first)


def _allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Finish,
    *,
    grouped: bool = False,
    quiet: bool = False,
) -> Handle:
    found = tensors_or_error(tensors, "allgather")
    rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in found]
    return submit(ALLGATHER, name, rows, None, process_set, finish, quiet=quiet, grouped=grouped)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, one after the other along the first dimension, in which they may differ.

    Differentiable: a rank's gradient is the average, over the ranks, of that of its own rows.
    """
    (result,) = _allgather([tensor], name, process_set, grouped=False)
    return result


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allgather` and returns a handle."""
    return _allgather_async(tensors, name, process_set, list, grouped=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of each tensor, in one go. Differentiable."""
    return _allgather(tensors, name, process_set, grouped=True)


def _allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool
) -> list[torch.Tensor]:
    found = tensors_or_error(tensors, "allgather")
    shapes = [tensor.shape for tensor in found]

    def gather(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        result: list[torch.Tensor] = _allgather_async(
            given, name, process_set, list, grouped=grouped, quiet=True
        ).wait()
        return result

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        called = f"{name}.grad" if name is not None else None
        averaged = reduce_group(list(gradients), Reduction.average(called, process_set))
        counts = torch.tensor([shape[0] if shape else 1 for shape in shapes]).reshape(1, -1)
        sizes = f"{name}.rows" if name is not None else None
        (table,) = grouped_allgather([counts], sizes, process_set)
        before = table[: process_set.rank()].sum(0).tolist()
        return [
            gradient.narrow(0, int(start), shape[0] if shape else 1).reshape(shape)
            for gradient, start, shape in zip(averaged, before, shapes, strict=True)
        ]

    return with_gradient(gather, back, found)


# Broadcast


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `broadcast` and returns a handle."""
    return _broadcast_async(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `broadcast_` and returns a handle."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=True)


def _broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    quiet: bool = False,
) -> Handle:
    tensor_or_error(tensor, "broadcast")
    root = session.current().place_in(process_set, root_rank, "broadcast: root rank")
    output = (
        tensor if in_place else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )
    return submit(BROADCAST, name, [tensor], [output], process_set, first, quiet=quiet, root=root)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites `tensor` with that of `root_rank` and returns it."""
    handle = _broadcast_async(tensor, root_rank, name, process_set, in_place=True, quiet=True)
    result: torch.Tensor = handle.wait()
    return result


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of `root_rank`, as a new one, on every rank.

    Differentiable: the root's gradient is the average over the ranks, that of the others is 0.
    """

    def send(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handle = _broadcast_async(given[0], root_rank, name, process_set, quiet=True)
        return [handle.wait()]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        called = f"{name}.grad" if name is not None else None
        averaged = reduce_one(gradients[0], Reduction.average(called, process_set))
        at_root = session.current().rank == root_rank
        return [averaged if at_root else torch.zeros_like(averaged)]

    (result,) = with_gradient(send, back, [tensor_or_error(tensor, "broadcast")])
    return result


# All-to-all


def _splits_of(tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> tuple[int, ...]:
    size = session.current().size_of(process_set)
    rows = tensor.shape[0] if tensor.dim() else -1
    if rows < 0:
        raise UserError("alltoall divides rows; a tensor without dimensions has none.")
    if splits is None:
        if rows % size:
            raise UserError(
                f"alltoall: {rows} rows cannot be split evenly between {size} ranks. Say how many "
                "go to each with splits=…"
            )
        return (rows // size,) * size
    counts = splits.tolist() if hasattr(splits, "tolist") else splits
    numbers = isinstance(counts, Sequence) and all(isinstance(count, int) for count in counts)
    if not numbers or len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise UserError(
            f"alltoall: splits={counts} for {rows} rows and {size} ranks. Give each rank a number "
            "of rows, 0 or more, that together are not more than there are."
        )
    return tuple(counts)


def _alltoall_async(
    tensor: torch.Tensor,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    finish: Finish,
    *,
    quiet: bool = False,
) -> Handle:
    counts = _splits_of(tensor_or_error(tensor, "alltoall"), splits, process_set)
    given = tensor[: sum(counts)]
    return submit(ALLTOALL, name, [given], None, process_set, finish, quiet=quiet, splits=counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `alltoall` and returns a handle, whose result always has the rows from each rank."""
    return _alltoall_async(tensor, splits, name, process_set, tuple)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank some rows of `tensor`; returns the rows that the others gave to this one.

    `splits[r]` rows go to rank r; without it, all get the same number. With it, the result is a
    pair: the rows, and how many came from each rank. Differentiable.
    """
    found = tensor_or_error(tensor, "alltoall")
    rows = found.shape[0] if found.dim() else 0
    taken: list[torch.Tensor] = []

    def send(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        received, counts = _alltoall_async(
            given[0], splits, name, process_set, tuple, quiet=True
        ).wait()
        taken.append(counts)
        return [received]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        called = f"{name}.grad" if name is not None else None
        returned, _ = alltoall(gradients[0], taken[0], called, process_set)
        kept = found.new_zeros((rows, *found.shape[1:]))  # rows that went nowhere have none
        kept[: returned.shape[0]] = returned
        return [kept]

    (received,) = with_gradient(send, back, [found])
    return received if splits is None else (received, taken[0])


# Those that move nothing


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the others' all-reduces with zeros.

    Returns when all ranks have joined: the rank that was last. `device` is Horovod's; zeros are
    made where they are needed.
    """
    del device
    here = session.current()
    engine = here.engine(global_process_set)
    work = Work(Request("join", "join"), [])
    engine.join(work)
    engine.wait(work)
    for counted in [key for key in here.counters if key[0] == 0]:
        del here.counters[counted]  # the ranks may have come to different numbers before
    return work.last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    submit(BARRIER, None, [], None, process_set, list, quiet=True).wait()

"""What a training script sends around at its start: parameters, the optimizer's state, objects.

Parameters and state travel many at once, because each collective takes its time. Objects travel as
bytes (`farandole.serialization.objects`): first how many, then the bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from farandole.comm.tensors import batches
from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine.objects import dump, dump_refusal, load
from farandole.horovod.torch.handles import Handle
from farandole.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    rank,
    synchronize,
)
from farandole.horovod.torch.optimizer_state import StatePlan

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites parameters with those of `root_rank`, in place.

    `params`: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. None among
    them is skipped. All ranks must pass tensors of the same names, shapes and dtypes.
    """
    named = list(_named_tensors(params))
    tensors = [tensor.detach() for _, tensor in named]
    if _is_same_on_all_ranks(named, process_set):
        for number, batch in enumerate(batches(tensors)):
            _broadcast_together(batch, root_rank, f"parameters.{number}", process_set)
    else:
        _broadcast_by_name([name for name, _ in named], tensors, root_rank, process_set)


def _is_same_on_all_ranks(
    named: Sequence[tuple[str, torch.Tensor]], process_set: ProcessSet
) -> bool:
    devices = list(dict.fromkeys(tensor.device for _, tensor in named))
    kinds = [
        (name, str(tensor.dtype), tuple(tensor.shape), devices.index(tensor.device))
        for name, tensor in named
    ]
    digest = torch.frombuffer(
        bytearray(hashlib.sha256(repr(kinds).encode()).digest()), dtype=torch.uint8
    )
    digests = allgather(digest.view(1, -1), "parameters.digest", process_set)
    return bool((digests == digest).all())


def _broadcast_together(
    tensors: Sequence[torch.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    """Tensors of one dtype and device as one: a thousand small ones take long one by one."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    broadcast_(flat, root_rank, name, process_set)
    if rank() != root_rank:
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def _broadcast_by_name(
    names: Sequence[str], tensors: Sequence[torch.Tensor], root_rank: int, process_set: ProcessSet
) -> None:
    """Where the ranks have other tensors, or in another order. Whatever does not fit is an error
    that names it, on every rank; all the others are asked for and waited for first."""
    handles: list[Handle] = []
    failures: list[HorovodInternalError | UserError] = []
    for name, tensor in zip(names, tensors, strict=True):
        try:
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
        except (HorovodInternalError, UserError) as error:
            failures.append(error)
    for handle in handles:
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _named_tensors(params: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """In the same order on every rank, each under a name of its own."""
    if isinstance(params, Mapping):
        items: Iterable[Any] = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        items = params
    else:
        raise UserError(
            f"broadcast_parameters cannot take a {type(params).__name__}. Pass "
            "model.state_dict(), model.named_parameters() or model.parameters()."
        )
    times: Counter[str] = Counter()
    for index, item in enumerate(items):
        key, tensor = item if isinstance(item, tuple) else (f"parameter.{index}", item)
        name = str(key)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            what = type(tensor).__name__
            what = f"{tensor.layout} {what}" if isinstance(tensor, torch.Tensor) else what
            raise UserError(
                f"{name!r} is a {what}, which cannot be overwritten. Leave it out, and send it "
                "with hvd.broadcast_object()."
            )
        times[name] += 1  # the parameters of two models may have the same names
        yield name if times[name] == 1 else f"{name}.{times[name]}", tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank's optimizer the state and the options (learning rate, …) of `root_rank`'s.

    The others need have no state yet. What they have is replaced; parameters are not touched.
    Where a parameter that is trained has no gradient yet it gets zeros, on every rank: Horovod
    makes a state by stepping with such, and scripts find them there. (Not for `SparseAdam`, which
    takes no dense ones.) `model` gives names to parameters that an error is about.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "the state of torch.optim.LBFGS cannot be broadcast: it is one search over all "
            "parameters. Send it with hvd.broadcast_object(optimizer.state_dict())."
        )
    is_root = rank() == root_rank
    plan, tensors = StatePlan.of(optimizer) if is_root else (None, [])
    plan = from_root(plan, root_rank, "optimizer", process_set)
    assert plan is not None
    if is_root:
        broadcast_parameters(_numbered(tensors), root_rank, process_set)
    else:
        content, tensors = plan.filled(optimizer)
        # Also when the optimizers differ: the others wait for this rank to take part.
        broadcast_parameters(_numbered(tensors), root_rank, process_set)
        plan.check(optimizer, root_rank, model)
        content.give_to(optimizer)
    if not isinstance(optimizer, torch.optim.SparseAdam):
        _make_gradients(optimizer)


def _make_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


def _numbered(tensors: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(f"optimizer.{number}", tensor) for number, tensor in enumerate(tensors)]


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """`root_rank`'s object, on every rank; what others pass does not matter.

    Any nest of plain values, tensors and arrays, and dataclasses and enums of modules that the
    receivers have imported. Tensors arrive on the CPU. Raises `UserError` on every rank when there
    is something else in it.
    """
    return from_root(obj, root_rank, name or "broadcast_object", process_set)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[T], T]:
    """`broadcast_object` as a function of the object alone."""

    def broadcast(obj: T) -> T:
        return from_root(obj, root_rank, name or "broadcast_object", process_set)

    return broadcast


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Every rank's object, in rank order. What they may be: see `broadcast_object`."""
    return from_all(obj, name or "allgather_object", process_set)


def from_all(obj: T, name: str, process_set: ProcessSet) -> list[T]:
    """As `allgather_object`."""
    payload, failure = _payload(obj)
    lengths = allgather(torch.tensor([len(payload)]), f"{name}.length", process_set)
    everything = allgather(_as_tensor(payload), f"{name}.bytes", process_set)
    if failure is not None:
        raise failure
    return [load(part.numpy().data) for part in everything.split(lengths.tolist())]


def from_root(obj: T, root_rank: int, name: str, process_set: ProcessSet) -> T:
    """As `broadcast_object`."""
    if rank() != root_rank:
        length = broadcast_(
            torch.zeros(1, dtype=torch.int64), root_rank, f"{name}.length", process_set
        )
        data = torch.empty(int(length), dtype=torch.uint8)
        received: T = load(broadcast_(data, root_rank, f"{name}.bytes", process_set).numpy().data)
        return received
    payload, failure = _payload(obj)
    broadcast_(torch.tensor([len(payload)]), root_rank, f"{name}.length", process_set)
    broadcast_(_as_tensor(payload), root_rank, f"{name}.bytes", process_set)
    if failure is not None:
        raise failure
    return obj


def _payload(obj: object) -> tuple[bytearray, Exception | None]:
    """What to send, and what to raise when everybody has been told."""
    try:
        return dump(obj), None
    except Exception as error:
        return dump_refusal(f"rank {rank()} could not send its object: {error}"), error


def _as_tensor(payload: bytearray) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8)

"""How functions that treat samples one by one are computed for a shard's own samples.

Each handler says NotImplemented where it does not know an argument, or where the samples would mix:
the function is then computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.layout.shards.batch_shard import BatchHandler, BatchShard, version_of
from farandole.layout.tiles.core.refusals import refuse

Args = tuple[Any, ...]
Named = dict[str, Any]


def wrapped(like: BatchShard, result: Any) -> Any:
    """The tensors of a result, each with as many rows as there are here, as shares."""
    if isinstance(result, torch.Tensor):
        return like.viewed(result)
    return pytree.tree_map_only(torch.Tensor, like.viewed, result)


def called(like: BatchShard, function: Any, given: Sequence[Any], args: Args, named: Named) -> Any:
    """Calls a function with this shard's rows; notes if it has changed what it was `given`."""
    rows = [leaf for leaf in given if isinstance(leaf, BatchShard)]
    # `inplace=True` is an argument like any other. Versions tell what was really written.
    versions = [version_of(each.own) for each in rows]
    result = function(*args, **named)
    for each, version in zip(rows, versions, strict=True):
        if version_of(each.own) != version:
            each.changed(function)
    return wrapped(like, result)


def aligned(like: BatchShard, tensor: torch.Tensor, dims: int) -> torch.Tensor | None:
    """This shard's part of a tensor that is broadcast against rows with so many dimensions."""
    if isinstance(tensor, BatchShard):
        return tensor.own if tensor.dim() == dims and tensor.goes_with(like) else None
    if tensor.dim() < dims:
        return tensor
    if tensor.dim() > dims:
        return None
    # A plain tensor with as many rows as the batch is broadcast sample by sample, so the shard
    # needs its own rows of it. With one row it is the same for all samples.
    if tensor.shape[0] == like.count:
        return like.spans.here(tensor)
    return tensor if tensor.shape[0] == 1 else None


def pointwise(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """What makes every element of its result from elements in the same place."""
    if len(args) == 1 and not named and args[0] is like:  # most have one tensor
        return called(like, function, args, (like.own,), {})
    if named.get("out") is not None:
        return NotImplemented
    leaves, spec = pytree.tree_flatten((args, named))
    dims = max(leaf.dim() for leaf in leaves if isinstance(leaf, torch.Tensor))
    here = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            part = aligned(like, leaf, dims)
            if part is None:
                return NotImplemented
            here.append(part)
        else:
            here.append(leaf)
    own_args, own_named = pytree.tree_unflatten(here, spec)
    return called(like, function, leaves, own_args, own_named)


def in_place(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """What changes its first argument, and returns it. A whole tensor is changed whole."""
    first = args[0] if args else None
    if not isinstance(first, BatchShard):
        return NotImplemented
    tensors = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
    dims = first.dim()
    # Checked before anything is written: a refusal must not leave half of a change behind.
    if any(leaf.dim() > dims or aligned(first, leaf, dims) is None for leaf in tensors):
        raise refuse(first.flow, function)
    pointwise(first, function, args, named)
    return first


def cannot_change(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """What changes its first argument in a way that is not known. A whole one is changed whole."""
    if args and not isinstance(args[0], BatchShard) and named.get("out") is None:
        return NotImplemented
    raise refuse(like.flow, function)


def converted(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """To another type or device; a tensor beside it only says which."""
    first, *rest = args
    if not isinstance(first, BatchShard):
        return NotImplemented
    rest = [each.own if isinstance(each, BatchShard) else each for each in rest]
    named = {
        name: each.own if isinstance(each, BatchShard) else each for name, each in named.items()
    }
    result = function(first.own, *rest, **named)
    return wrapped(first, result)


def of_its_kind(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """What makes a plain tensor, of another's type and on its device."""
    first, *rest = args
    if not isinstance(first, BatchShard) or has_rows((rest, named)):
        return NotImplemented
    return function(first.own, *rest, **named)


def drawn_like(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """Random numbers, drawn for all samples: every shard draws the same."""
    shape = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    return function(shape, *args[1:], **named)


def alone(holds: Callable[..., bool] = lambda x, *args, **named: True) -> BatchHandler:
    """Of a function whose first argument are samples, and all others weights and numbers.

    `holds`, of all arguments: whether the samples stay apart.
    """

    def handler(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
        if not args or not isinstance(args[0], BatchShard) or has_rows((args[1:], named)):
            return NotImplemented
        if named.get("out") is not None or not holds(*args, **named):
            return NotImplemented
        return called(like, function, args[:1], (args[0].own, *args[1:]), named)

    return handler


def with_axes(
    count: int, holds: Callable[..., bool] = lambda x, *args, **named: True
) -> BatchHandler:
    """As `alone`, for samples with so many axes at least."""
    return alone(lambda x, *args, **named: x.dim() >= count and bool(holds(x, *args, **named)))


def over(position: int, default: int | None = None) -> BatchHandler:
    """Of a function over dimensions, which are its argument number `position`, or `dim`, or `axis`.

    `default`: the dimension that is meant if none is given; none: all.
    """

    def holds(x: BatchShard, *args: Any, **named: Any) -> bool:
        given = named.get("dim", named.get("axis", default))
        if len(args) >= position:
            given = args[position - 1]
        dims = dims_of(given, x.dim())
        return bool(dims) and 0 not in dims

    return alone(holds)


def over_or_pointwise(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.max` and `torch.min`: over a dimension, or of two tensors."""
    if any(isinstance(each, torch.Tensor) for each in (*args[1:], *named.values())):
        return pointwise(like, function, args, named)
    return over(1)(like, function, args, named)


def dims_of(given: Any, count: int) -> list[int]:
    """An argument `dim` as positive numbers; nothing if it is not understood."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if not isinstance(given, (tuple, list)) or any(type(each) is not int for each in given):
        return []
    if any(not -count <= each < count for each in given):
        return []
    return [each % count for each in given]


def has_rows(value: Any) -> bool:
    return any(isinstance(leaf, BatchShard) for leaf in pytree.tree_leaves(value))

"""How functions that treat samples one by one are computed for a lane's own samples.

Each handler says NotImplemented where it does not know an argument, or where the samples would mix:
the function is then computed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from farandole.layout.shards.rows import RowHandler, Rows, version_of
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.tile import refuse
from farandole.layout.tiles.ops.batchnorm import Spread, normalised

Args = tuple[Any, ...]
Named = dict[str, Any]


def wrapped(like: Rows, result: Any) -> Any:
    """The tensors of a result, each with as many rows as there are here, as shares."""
    if isinstance(result, torch.Tensor):
        return like.viewed(result)
    return pytree.tree_map_only(torch.Tensor, like.viewed, result)


def called(like: Rows, function: Any, given: Sequence[Any], args: Args, named: Named) -> Any:
    """Calls a function with this lane's rows; notes if it has changed what it was `given`."""
    rows = [leaf for leaf in given if isinstance(leaf, Rows)]
    versions = [version_of(each.own) for each in rows]
    result = function(*args, **named)
    for each, version in zip(rows, versions, strict=True):
        if version_of(each.own) != version:
            each.changed(function)
    return wrapped(like, result)


def aligned(like: Rows, tensor: torch.Tensor, dims: int) -> torch.Tensor | None:
    """This lane's part of a tensor that is broadcast against rows with so many dimensions."""
    if isinstance(tensor, Rows):
        return tensor.own if tensor.dim() == dims and tensor.goes_with(like) else None
    if tensor.dim() < dims:
        return tensor
    if tensor.dim() > dims:
        return None
    if tensor.shape[0] == like.count:
        return like.spans.here(tensor)
    return tensor if tensor.shape[0] == 1 else None


def pointwise(like: Rows, function: Any, args: Args, named: Named) -> Any:
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


def in_place(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """What changes its first argument, and returns it. A whole tensor is changed whole."""
    first = args[0] if args else None
    if not isinstance(first, Rows):
        return NotImplemented
    tensors = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
    dims = first.dim()
    if any(leaf.dim() > dims or aligned(first, leaf, dims) is None for leaf in tensors):
        raise refuse(first.flow, function)
    pointwise(first, function, args, named)
    return first


def cannot_change(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """What changes its first argument in a way that is not known. A whole one is changed whole."""
    if args and not isinstance(args[0], Rows) and named.get("out") is None:
        return NotImplemented
    raise refuse(like.flow, function)


def converted(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """To another type or device; a tensor beside it only says which."""
    first, *rest = args
    if not isinstance(first, Rows):
        return NotImplemented
    rest = [each.own if isinstance(each, Rows) else each for each in rest]
    named = {name: each.own if isinstance(each, Rows) else each for name, each in named.items()}
    result = function(first.own, *rest, **named)
    return wrapped(first, result)


def of_its_kind(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """What makes a plain tensor, of another's type and on its device."""
    first, *rest = args
    if not isinstance(first, Rows) or _has_rows((rest, named)):
        return NotImplemented
    return function(first.own, *rest, **named)


def drawn_like(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """Random numbers, drawn for all samples: every lane draws the same."""
    shape = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    return function(shape, *args[1:], **named)


def alone(holds: Callable[..., bool] = lambda x, *args, **named: True) -> RowHandler:
    """Of a function whose first argument are samples, and all others weights and numbers.

    `holds`, of all arguments: whether the samples stay apart.
    """

    def handler(like: Rows, function: Any, args: Args, named: Named) -> Any:
        if not args or not isinstance(args[0], Rows) or _has_rows((args[1:], named)):
            return NotImplemented
        if named.get("out") is not None or not holds(*args, **named):
            return NotImplemented
        return called(like, function, args[:1], (args[0].own, *args[1:]), named)

    return handler


def with_axes(
    count: int, holds: Callable[..., bool] = lambda x, *args, **named: True
) -> RowHandler:
    """As `alone`, for samples with so many axes at least."""
    return alone(lambda x, *args, **named: x.dim() >= count and bool(holds(x, *args, **named)))


def over(position: int, default: int | None = None) -> RowHandler:
    """Of a function over dimensions, which are its argument number `position`, or `dim`, or `axis`.

    `default`: the dimension that is meant if none is given; none: all.
    """

    def holds(x: Rows, *args: Any, **named: Any) -> bool:
        given = named.get("dim", named.get("axis", default))
        if len(args) >= position:
            given = args[position - 1]
        dims = dims_of(given, x.dim())
        return bool(dims) and 0 not in dims

    return alone(holds)


def over_or_pointwise(like: Rows, function: Any, args: Args, named: Named) -> Any:
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


def _has_rows(value: Any) -> bool:
    return any(isinstance(leaf, Rows) for leaf in pytree.tree_leaves(value))


# Layers


def batch_norm(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`F.batch_norm`, in training with statistics over the rows of all lanes."""
    if not args or not isinstance(args[0], Rows) or _has_rows((args[1:], named)):
        return NotImplemented
    return _batch_norm(*args, **named)


def _batch_norm(
    input: Rows,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    own = input.own
    if not training:
        result = F.batch_norm(own, running_mean, running_var, weight, bias, False, momentum, eps)
        return input.like(result)
    if own.dim() < 2:
        return NotImplemented
    lanes = input.flow.lanes
    sizes = own.shape[1:]
    box = None if input.spans.share.spare else tuple(Interval(0, size) for size in sizes)
    spread = Spread(
        lanes,
        lanes.next(),
        tuple(range(lanes.grid.lanes)),
        [Interval(0, sizes[0])] * lanes.grid.lanes,
        [box],
        input.count * math.prod(sizes[1:]),
        eps,
    )
    (made,) = normalised(spread, [own], running_mean, running_var, weight, bias, momentum, sizes[0])
    return input.like(made)


def dropout(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """Draws for the whole batch, and keeps this lane's rows."""
    if not args or not isinstance(args[0], Rows) or _has_rows((args[1:], named)):
        return NotImplemented
    return _dropout(function, *args, **named)


def _dropout(
    function: Any,
    input: Rows,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    if training is None:  # as in torch
        training = function not in (F.alpha_dropout, F.feature_alpha_dropout)
    if not training or p == 0.0:
        return input
    own = input.own
    whole = own.new_zeros(tuple(input.shape))
    whole[input.spans.span(input.spans.lane)] = own
    result = input.spans.here(function(whole, p, True))
    if not inplace:
        return input.like(result.clone())
    own.copy_(result)
    input.changed(function)
    return input


def embedding(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`F.embedding`; a `max_norm` would change the weights."""

    def holds(
        x: Rows, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
    ) -> bool:
        return max_norm is None

    return alone(holds)(like, function, args, named)


def affine_grid(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`F.affine_grid`, whose `size` counts the samples."""
    bound = dict(zip(("theta", "size", "align_corners"), args, strict=False)) | named
    size = list(bound["size"])
    if not isinstance(bound["theta"], Rows) or size[0] != like.count:
        return NotImplemented
    here = {**bound, "theta": like.own, "size": [like.own.shape[0], *size[1:]]}
    return like.like(function(**here))


def grid_sample(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`F.grid_sample`: a grid for every sample."""
    return pointwise(like, function, args, named)


def joined(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`torch.cat` and `torch.stack`, but not of samples."""
    bound = dict(zip(("tensors", "dim"), args, strict=False)) | named
    tensors = bound.pop("tensors", None)
    dim = bound.pop("dim", 0)
    if not isinstance(tensors, (tuple, list)) or bound or type(dim) is not int:
        return NotImplemented
    dims = like.dim() + (function is torch.stack)
    if not -dims <= dim < dims or dim % dims == 0:
        return NotImplemented
    here = []
    for each in tensors:
        part = aligned(like, each, like.dim())
        # Nothing is broadcast here.
        if part is None or each.dim() != like.dim() or each.shape[0] != like.count:
            return NotImplemented
        here.append(part)
    return like.like(function(here, dim))


def matmul(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`torch.matmul` and `bmm`, where the samples are no dimension of the matrices."""
    if named or len(args) != 2:
        return NotImplemented
    one, other = args
    dims = max(one.dim(), other.dim())
    by_rows = isinstance(one, Rows) and one.dim() >= 2 and other.dim() <= 2
    if by_rows and not isinstance(other, Rows):  # every row of a matrix alone
        return like.like(function(one.own, other))
    if dims < 3:
        return NotImplemented
    parts = [aligned(like, each, dims) for each in args]
    if any(part is None for part in parts):
        return NotImplemented
    return like.like(function(*parts))


def attention(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`F.scaled_dot_product_attention`; dropout is drawn for all samples."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = dict(zip(names, args, strict=False)) | named
    dims = max(bound[name].dim() for name in names[:3])
    if bound.get("dropout_p", 0.0) or dims < 3:
        return NotImplemented
    return pointwise(like, function, (), bound)


def einsum(like: Rows, function: Any, args: Args, named: Named) -> Any:
    """`torch.einsum`, where the samples are the first letter of what has them."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or named:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    letters = {
        term[0] for term, each in zip(terms, operands, strict=True) if isinstance(each, Rows)
    }
    if len(letters) != 1:
        return NotImplemented
    (batch,) = letters
    here = []
    for term, each in zip(terms, operands, strict=True):
        if batch in term[1:] or (isinstance(each, Rows) and not each.goes_with(like)):
            return NotImplemented
        if isinstance(each, Rows):
            here.append(each.own)
        else:
            here.append(like.spans.here(each) if term[0] == batch else each)
        if term[:1] == batch and each.shape[0] != like.count:
            return NotImplemented
    if output[:1] != batch or batch in output[1:]:
        return NotImplemented
    return like.like(function(equation, *here))

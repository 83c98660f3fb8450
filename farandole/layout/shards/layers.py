"""How layers are computed for a shard's own samples: normalisation, dropout, products of matrices.

Each handler says NotImplemented where it does not know an argument, or where the samples would mix:
the function is then computed whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from farandole.layout.shards.batch_shard import BatchShard
from farandole.layout.shards.functions import Args, Named, aligned, alone, has_rows, pointwise
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.ops.batchnorm import BatchNormTask, normalised


def batch_norm(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`F.batch_norm`, in training with statistics over the rows of all shards."""
    if not args or not isinstance(args[0], BatchShard) or has_rows((args[1:], named)):
        return NotImplemented
    return _batch_norm(*args, **named)


def _batch_norm(
    input: BatchShard,
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
    shards = input.flow.shards
    sizes = own.shape[1:]
    # A spare shard repeats a sample: it is normalised like the others, and is not in the
    # statistics.
    box = None if input.spans.own_range.spare else tuple(Interval(0, size) for size in sizes)
    task = BatchNormTask(
        shards,
        shards.next(),
        tuple(range(shards.grid.shards)),
        [Interval(0, sizes[0])] * shards.grid.shards,
        [box],
        input.count * math.prod(sizes[1:]),
        eps,
    )
    (made,) = normalised(task, [own], running_mean, running_var, weight, bias, momentum, sizes[0])
    return input.like(made)


def dropout(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """Draws for the whole batch, and keeps this shard's rows."""
    if not args or not isinstance(args[0], BatchShard) or has_rows((args[1:], named)):
        return NotImplemented
    return _dropout(function, *args, **named)


def _dropout(
    function: Any,
    input: BatchShard,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    if training is None:  # as in torch
        training = function not in (F.alpha_dropout, F.feature_alpha_dropout)
    if not training or p == 0.0:
        return input
    own = input.own
    # Drawn for the whole batch, because all shards have one random state: each draws the same mask
    # and keeps its own rows of it.
    whole = own.new_zeros(tuple(input.shape))
    whole[input.spans.span(input.spans.shard)] = own
    result = input.spans.here(function(whole, p, True))
    if not inplace:
        return input.like(result.clone())
    own.copy_(result)
    input.changed(function)
    return input


def embedding(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`F.embedding`; a `max_norm` would change the weights."""

    def holds(
        x: BatchShard,
        weight: Any,
        padding_idx: Any = None,
        max_norm: Any = None,
        *_: Any,
        **__: Any,
    ) -> bool:
        return max_norm is None

    return alone(holds)(like, function, args, named)


def affine_grid(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`F.affine_grid`, whose `size` counts the samples."""
    bound = dict(zip(("theta", "size", "align_corners"), args, strict=False)) | named
    size = list(bound["size"])
    if not isinstance(bound["theta"], BatchShard) or size[0] != like.count:
        return NotImplemented
    here = {**bound, "theta": like.own, "size": [like.own.shape[0], *size[1:]]}
    return like.like(function(**here))


def joined(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
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


def matmul(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.matmul` and `bmm`, where the samples are no dimension of the matrices."""
    if named or len(args) != 2:
        return NotImplemented
    one, other = args
    dims = max(one.dim(), other.dim())
    by_rows = isinstance(one, BatchShard) and one.dim() >= 2 and other.dim() <= 2
    if by_rows and not isinstance(other, BatchShard):  # every row of a matrix alone
        return like.like(function(one.own, other))
    # With two dimensions, the samples are rows of the matrix on the left, which is done above, or
    # columns of a product that mixes them.
    if dims < 3:
        return NotImplemented
    parts = [aligned(like, each, dims) for each in args]
    if any(part is None for part in parts):
        return NotImplemented
    return like.like(function(*parts))


def attention(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`F.scaled_dot_product_attention`; dropout is drawn for all samples."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = dict(zip(names, args, strict=False)) | named
    dims = max(bound[name].dim() for name in names[:3])
    if bound.get("dropout_p", 0.0) or dims < 3:
        return NotImplemented
    return pointwise(like, function, (), bound)


def einsum(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.einsum`, where the samples are the first letter of what has them."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or named:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    letters = {
        term[0] for term, each in zip(terms, operands, strict=True) if isinstance(each, BatchShard)
    }
    if len(letters) != 1:
        return NotImplemented
    (batch,) = letters
    here = []
    for term, each in zip(terms, operands, strict=True):
        # The samples' letter may only be the first of a term. Elsewhere the samples would be summed
        # over or mixed.
        if batch in term[1:] or (isinstance(each, BatchShard) and not each.goes_with(like)):
            return NotImplemented
        if isinstance(each, BatchShard):
            here.append(each.own)
        else:
            here.append(like.spans.here(each) if term[0] == batch else each)
        if term[:1] == batch and each.shape[0] != like.count:
            return NotImplemented
    if output[:1] != batch or batch in output[1:]:
        return NotImplemented
    return like.like(function(equation, *here))

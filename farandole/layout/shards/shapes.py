"""Shapes of a shard's own samples, asked for as if they were those of the whole batch.

The rows of a sample stay together on one shard: so a batch of images may become one of all their
tokens, and back.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from farandole.layout.shards.batch_shard import BatchShard
from farandole.layout.shards.functions import Args, Named, called, dims_of, in_place
from farandole.layout.tiles.core.refusals import refuse


def reshape(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`view` and `reshape`, with whole samples in every row or whole rows in every sample."""
    shape = args[1:] if len(args) > 1 else tuple(named.values())
    wanted = _sizes(shape)
    if wanted is None or not isinstance(args[0], BatchShard) or (len(args) > 1 and named):
        return NotImplemented
    return _reshaped(args[0], function, wanted)


def view_as(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`view_as` and `reshape_as`; of `other`, only the shape counts."""
    if named or len(args) != 2:
        return NotImplemented
    first, other = args
    plain = torch.Tensor.view if function is torch.Tensor.view_as else torch.Tensor.reshape
    if not isinstance(first, BatchShard):
        return plain(first, tuple(other.shape))
    return _reshaped(first, plain, list(other.shape))


def flatten(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.flatten`."""
    bound = dict(zip(("input", "start_dim", "end_dim"), args, strict=False)) | named
    first = bound.pop("input", None)
    start, end = bound.pop("start_dim", 0), bound.pop("end_dim", -1)
    if not isinstance(first, BatchShard) or bound or type(start) is not int or type(end) is not int:
        return NotImplemented
    shape = list(first.shape)
    start, end = start % len(shape), end % len(shape)
    if start > end:
        return NotImplemented
    length = math.prod(shape[start : end + 1])
    return _reshaped(first, torch.reshape, [*shape[:start], length, *shape[end + 1 :]])


def unflatten(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.unflatten`."""
    bound = dict(zip(("input", "dim", "sizes"), args, strict=False)) | named
    first, dim, sizes = (bound.pop(name, None) for name in ("input", "dim", "sizes"))
    if not isinstance(first, BatchShard) or bound or type(dim) is not int:
        return NotImplemented
    shape, wanted = list(first.shape), _sizes((sizes,))
    if wanted is None:
        return NotImplemented
    at = dim % len(shape)
    known = math.prod(size for size in wanted if size != -1)
    wanted = [shape[at] // max(1, known) if size == -1 else size for size in wanted]
    return _reshaped(first, torch.reshape, [*shape[:at], *wanted, *shape[at + 1 :]])


def _sizes(shape: Args) -> list[int] | None:
    """A shape that is given as numbers or as one tuple; None: something else."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    return None if not shape or any(type(each) is not int for each in shape) else list(shape)


def _reshaped(first: BatchShard, function: Any, wanted: list[int]) -> Any:
    if not first.numel() or not wanted:
        return NotImplemented
    known = math.prod(size for size in wanted if size != -1)
    wanted = [first.numel() // max(1, known) if size == -1 else size for size in wanted]
    # Samples stay whole only if each of them makes the same number of rows.
    if math.prod(wanted) != first.numel() or wanted[0] % first.samples:
        return NotImplemented
    factor = wanted[0] // first.samples
    here = first.own.shape[0] // first.factor * factor
    return first.viewed(function(first.own, (here, *wanted[1:])), factor)


def permute(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.permute`; the samples stay in front."""
    order = _sizes(args[1:] or tuple(named.values()))
    if order is None or not isinstance(args[0], BatchShard) or order[0] not in (0, -like.dim()):
        return NotImplemented
    return like.viewed(torch.permute(like.own, order))


def transpose(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.transpose` and `movedim`, of other dimensions than the samples."""
    first, *rest = (*args, *named.values())
    dims = [each for given in rest for each in dims_of(given, like.dim()) or [0]]
    if not isinstance(first, BatchShard) or len(rest) != 2 or 0 in dims:
        return NotImplemented
    return called(like, function, args[:1], (first.own, *args[1:]), named)


def unsqueeze(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    first, *rest = (*args, *named.values())
    dims = dims_of(rest[0], like.dim() + 1) if len(rest) == 1 else []
    if not isinstance(first, BatchShard) or not dims or 0 in dims:
        return NotImplemented
    return like.viewed(first.own.unsqueeze(dims[0]))


def squeeze(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    first, *rest = (*args, *named.values())
    if not isinstance(first, BatchShard) or len(rest) > 1:
        return NotImplemented
    dims = dims_of(rest[0], like.dim()) if rest else list(range(like.dim()))
    if not dims or (0 in dims and like.count == 1):
        return NotImplemented
    gone = [at for at in dims if at]
    return like.viewed(first.own.squeeze(gone)) if gone else first


def expand(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`Tensor.expand`, of other dimensions than the samples."""
    first = args[0]
    if not isinstance(first, BatchShard):
        return NotImplemented
    wanted = _sizes(args[1:] or tuple(named.values()))
    if wanted is None or len(wanted) != first.dim() or wanted[0] not in (-1, first.count):
        return NotImplemented
    return first.viewed(first.own.expand(first.own.shape[0], *wanted[1:]))


def expand_as(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`Tensor.expand_as`; of `other`, only the shape counts."""
    if named or len(args) != 2:
        return NotImplemented
    return args[0].expand(tuple(args[1].shape))


def repeat(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`Tensor.repeat` and `torch.tile`, of other dimensions than the samples."""
    first = args[0]
    times = _sizes(args[1:] or tuple(named.values()))
    if not isinstance(first, BatchShard) or times is None or len(times) > first.dim():
        return NotImplemented
    if len(times) == first.dim() and times[0] != 1:
        return NotImplemented
    return called(like, function, args[:1], (first.own, *args[1:]), named)


def flip(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`torch.flip`; not of the samples."""
    given = _sizes(args[1:] or tuple(named.values()))
    if (
        not isinstance(args[0], BatchShard)
        or given is None
        or 0 in (each % like.dim() for each in given)
    ):
        return NotImplemented
    return like.like(torch.flip(like.own, given))


def getitem(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`x[:, …]`: all samples, and whatever of each."""
    first, index = args
    own_index = kept_index(first, index)
    return NotImplemented if own_index is None else first.viewed(first.own[own_index])


def setitem(like: BatchShard, function: Any, args: Args, named: Named) -> Any:
    """`x[:, …] = …`."""
    first, index, value = args
    if not isinstance(first, BatchShard):
        return NotImplemented
    own_index = kept_index(first, index)
    if own_index is None or not all(
        isinstance(part, (slice, int, type(None), type(Ellipsis))) for part in own_index
    ):
        raise refuse(first.flow, function)
    part = first.viewed(first.own[own_index])
    if isinstance(value, torch.Tensor):
        in_place(part, torch.Tensor.copy_, (part, value), {})
    else:
        in_place(part, torch.Tensor.fill_, (part, value), {})
    return None


def kept_index(first: Any, index: Any) -> tuple[Any, ...] | None:
    """An index that takes all samples, and leaves them in front; None: another one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(first, BatchShard) or not parts:
        return None
    if any(isinstance(part, (BatchShard, bool)) for part in parts):
        return None
    tensors = [part for part in parts if isinstance(part, (torch.Tensor, list))]
    known = (slice, int, type(None), type(Ellipsis), torch.Tensor, list)
    if len(tensors) > 1 or not all(isinstance(part, known) for part in parts):
        return None
    # A number beside a tensor may move dimensions to the front.
    if tensors and any(isinstance(part, int) for part in parts):
        return None
    front = parts[0]
    if front is Ellipsis:
        taken = sum(_taken(part) for part in parts[1:] if part is not None)
        return tuple(parts) if taken < first.dim() else None
    if isinstance(front, slice) and front == slice(None):
        return tuple(parts)
    return None


def _taken(part: Any) -> int:
    """How many dimensions a part of an index takes."""
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1

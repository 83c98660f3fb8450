"""Which functions of torch can be computed tile by tile, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.layout.tiles.core.flow import Flow, Handler
from farandole.layout.tiles.core.refusals import refused
from farandole.layout.tiles.core.side_effects import has_side_effects
from farandole.layout.tiles.core.spelling import strict
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.ops import (
    batchnorm,
    convolution,
    dropout,
    joining,
    linear,
    losses,
    norms,
    picking,
    pointwise,
    pooling,
    reductions,
    resize,
    shapes,
)
from farandole.layout.tiles.ops.pointwise import along, cannot_change, converted, in_place

POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul arccos arcsin arctan arctan2 asin asinh atan atan2
    atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil
    clamp clamp_max clamp_min clip clone
    conj_physical copysign cos cosh deg2rad detach digamma div divide eq erf erfc erfinv exp exp2
    expm1 fix float_power floor floor_divide fmax fmin fmod frac full_like ge greater
    greater_equal gt hardshrink heaviside hypot isclose isfinite isinf isnan isneginf isposinf le
    lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg
    negative not_equal ones_like positive pow rad2deg reciprocal relu remainder round rsqrt rsub
    sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc
    xlogy zeros_like
"""
METHODS = """
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__
    __lshift__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__
    __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__
    __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
"""
CONVERSIONS = """
    bfloat16 bool byte char contiguous cpu cuda double float half int long short to type type_as
"""
ACTIVATIONS = """
    celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid
    silu softplus softshrink softsign tanh tanhshrink threshold
"""
IN_PLACE = """
    abs_ add_ addcdiv_ addcmul_ celu_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ copysign_ cos_ div_
    divide_ elu_ erf_ exp_ expm1_ fill_ floor_ fmod_ hardsigmoid_ hardswish_ hardtanh_ leaky_relu_
    lerp_ log1p_ log_ masked_fill_ mish_ mul_ multiply_ nan_to_num_ neg_ negative_ pow_ reciprocal_
    relu6_ relu_ remainder_ round_ rsqrt_ selu_ sigmoid_ sign_ silu_ sin_ sqrt_ square_ sub_
    subtract_ tanh_ threshold_ trunc_ zero_
    __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__
    __irshift__ __isub__ __itruediv__ __ixor__ bitwise_left_shift_ bitwise_right_shift_
"""
_ALONG = "cumsum cumprod log_softmax logsumexp softmax"
_REDUCING = "amax amin argmax argmin logsumexp max min"
NEW = "new_empty new_full new_ones new_tensor new_zeros"
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss l1_loss mse_loss
    smooth_l1_loss
"""
_DIMENSIONS = ("1d", "2d", "3d")


PLACES = (torch, Tensor, F, torch._C._nn, torch.special)
"""Where functions of single elements are."""


def found(place: Any, names: str) -> list[Any]:
    return [getattr(place, name) for name in names.split() if hasattr(place, name)]


def changing(place: Any) -> list[Any]:
    """What changes a tensor in place, by its name."""
    names = [name for name in dir(place) if name.endswith("_") and name[0] != "_"]
    names += ["__setitem__", *(name for name in METHODS.split() if name.startswith("__i"))]
    return found(place, " ".join(names))


def _requires_grad(flow: Flow, input: Tile) -> bool:
    return any(piece.requires_grad for piece in input.pieces)


def _is_leaf(flow: Flow, input: Tile) -> bool:
    return not _requires_grad(flow, input)


def _data(flow: Flow, input: Tile) -> Tile:
    made = input.map(lambda piece: piece.detach())
    made.copied = input.copied
    return made


def _is_contiguous(flow: Flow, input: Tile, *args: Any, **kwargs: Any) -> bool:
    """A tile can always be viewed as if it was."""
    # Code asks before it calls `view`, which a tile can do however its pieces lie in memory.
    return True


def _of_its_kind(function: Callable[..., Any]) -> Handler:
    """Of a function that makes a plain tensor, of a tile's type and on its device."""
    return lambda flow, input, *args, **kwargs: function(input.pieces[0], *args, **kwargs)


def _elements() -> dict[Any, Handler]:
    """What is computed for every element alone."""
    table: dict[Any, Handler] = {}
    # Whatever changes a tensor in place, unless it is known how.
    for place in PLACES:
        # Later entries replace earlier ones: first every function is refused that might write to a
        # tensor, then the known ones get their handlers. A function that torch adds later is
        # refused, not computed wrongly.
        table |= {each: cannot_change(each) for each in changing(place)}
    table |= {each: refused(each) for each in has_side_effects()}
    for place in PLACES:
        names = POINTWISE + ACTIVATIONS + (METHODS if place is Tensor else "")
        table |= {each: pointwise.pointwise(each) for each in found(place, names)}
        table |= {each: in_place(each) for each in found(place, IN_PLACE)}
        for function in found(place, "rrelu"):
            table[function] = pointwise.rrelu
        for function in found(place, "prelu"):
            table[function] = pointwise.prelu
    table |= {each: converted(each) for each in found(Tensor, CONVERSIONS)}
    table |= {each: _of_its_kind(each) for each in found(Tensor, NEW)}
    table |= {torch.where: pointwise.where, Tensor.where: _where}
    return table


def _where(flow: Flow, input: Any, condition: Any, other: Any) -> Any:
    """`Tensor.where`, which names the condition second."""
    return pointwise.where(flow, condition, input, other)


def _lines() -> dict[Any, Handler]:
    """What is computed along one dimension."""
    table: dict[Any, Handler] = {}
    for place in (torch, Tensor, F, torch.special):
        table |= {each: along(each) for each in found(place, _ALONG)}
        table |= {each: along(each, keeps=False) for each in found(place, _REDUCING)}
    table[F.softmin] = along(F.softmin)
    table[F.normalize] = along(F.normalize, default=1)
    return table


def _windows() -> dict[Any, Handler]:
    """Layers that look at windows, and others that there are for each number of axes."""
    table: dict[Any, Handler] = {}
    for index, dimensions in enumerate(_DIMENSIONS):
        for name, handler in (
            ("conv", convolution.conv),
            ("conv_transpose", convolution.conv_transpose),
            ("max_pool", pooling.max_pool),
            ("avg_pool", pooling.avg_pool),
            ("lp_pool", pooling.lp_pool),
            ("adaptive_avg_pool", pooling.adaptive_avg_pool),
            ("adaptive_max_pool", pooling.adaptive_max_pool),
        ):
            bound = pooling.each_dimension(handler)[index]
            for place in (F, torch, torch._C._nn):
                table |= dict.fromkeys(found(place, f"{name}{dimensions}"), bound)
        drop = getattr(F, f"dropout{dimensions}")
        table[drop] = dropout.feature_dropout(drop, index + 1)
    return table


def _moves() -> dict[Any, Handler]:
    """Sums, and what only changes shapes and places."""
    table: dict[Any, Handler] = {}
    handlers: dict[str, Handler] = {
        "sum": reductions.total,
        "mean": reductions.mean,
        "var": reductions.variance,
        "std": reductions.deviation,
        "permute": shapes.permute,
        "transpose": shapes.transpose,
        "swapaxes": shapes.swapaxes,
        "swapdims": shapes.transpose,
        "movedim": shapes.movedim,
        "moveaxis": shapes.movedim,
        "flatten": shapes.flatten,
        "unflatten": shapes.unflatten,
        "reshape": shapes.reshape,
        "view": shapes.reshape,
        "squeeze": shapes.squeeze,
        "unsqueeze": shapes.unsqueeze,
        "expand": shapes.expand,
        "expand_as": shapes.expand_as,
        "narrow": picking.narrow,
        "split": picking.split,
        "chunk": picking.chunk,
        "roll": picking.roll,
        "flip": picking.flip,
        "cat": joining.cat,
        "concat": joining.cat,
        "concatenate": joining.cat,
    }
    for place in (torch, Tensor):
        for name, handler in handlers.items():
            table |= dict.fromkeys(found(place, name), handler)
    for place in (F, torch):
        for name, handler in (
            ("pixel_shuffle", resize.pixel_shuffle),
            ("pixel_unshuffle", resize.pixel_unshuffle),
            ("channel_shuffle", picking.channel_shuffle),
        ):
            table |= dict.fromkeys(found(place, name), handler)
    return table


def _layers() -> dict[Any, Handler]:
    return {
        Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
        Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
        Tensor.data.__get__: _data,  # type: ignore[attr-defined]
        Tensor.is_contiguous: _is_contiguous,
        Tensor.__getitem__: picking.getitem,
        F.pad: picking.pad,
        F.glu: picking.glu,
        F.linear: linear.linear,
        F.batch_norm: batchnorm.batch_norm,
        F.group_norm: norms.group_norm,
        F.instance_norm: norms.instance_norm,
        F.layer_norm: norms.layer_norm,
        F.rms_norm: norms.rms_norm,
        F.local_response_norm: norms.local_response_norm,
        F.interpolate: resize.interpolate,
        F.dropout: dropout.dropout,
        torch.dropout: dropout.dropout,
        F.alpha_dropout: dropout.alpha_dropout,
        F.feature_alpha_dropout: dropout.feature_alpha_dropout,
        F.cross_entropy: losses.cross_entropy,
        F.nll_loss: losses.nll_loss,
        **{each: losses.elementwise(each) for each in found(F, _LOSSES)},
    }


@functools.cache  # signatures of 600 handlers are read for it, and it never changes
def functions() -> Mapping[Any, Handler]:
    """All of them, by function."""
    table = {**_elements(), **_lines(), **_windows(), **_moves(), **_layers()}
    return MappingProxyType({each: strict(each, handler) for each, handler in table.items()})

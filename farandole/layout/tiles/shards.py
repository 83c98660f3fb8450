"""Behind the hand-off: what must not be computed for each lane's samples alone.

A model may have asked for the size of the batch when it was still that of the whole batch; where it
asks for such a shape now, this lane's samples are meant. BatchNorm takes its statistics over the
samples of all lanes, and dropout draws for the whole batch and keeps this lane's rows: so the
result is that of one process. All else behind the hand-off is taken to treat samples one by one, as
any data-parallel training does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from farandole.layout.tiles.batchnorm import Spread, normalised
from farandole.layout.tiles.handoff import share_of
from farandole.layout.tiles.intervals import Interval
from farandole.layout.tiles.tile import Flow, Tile

_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


_SHAPED = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand)


class Shards(TorchFunctionMode):
    """Inside, plain tensors are this lane's share of `samples`."""

    def __init__(self, flow: Flow, samples: int) -> None:
        super().__init__()
        self._flow = flow
        self._samples = samples

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special: Callable[..., Any] | None = None
        if func in _SHAPED:
            special = self._shaped
        elif func is F.batch_norm:
            special = self._batch_norm
        elif func in _DROPOUTS:
            special = self._dropout
        if special is None or any(isinstance(each, Tile) for each in args):
            return func(*args, **kwargs)
        return special(func, *args, **kwargs)

    def _batch_norm(
        self,
        function: Any,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, False, momentum, eps
            )
        lanes = self._flow.lanes
        (lane,) = lanes.mine
        sizes = input.shape[1:]
        spare = share_of(lane, lanes.grid.lanes, self._samples).spare
        box = None if spare else tuple(Interval(0, size) for size in sizes)
        spread = Spread(
            lanes,
            lanes.next(),
            tuple(range(lanes.grid.lanes)),
            [Interval(0, sizes[0])] * lanes.grid.lanes,
            [box],
            self._samples * math.prod(sizes[1:]),
            eps,
        )
        (result,) = normalised(
            spread, [input], running_mean, running_var, weight, bias, momentum, sizes[0]
        )
        return result

    def _shaped(
        self, function: Callable[..., torch.Tensor], input: torch.Tensor, *shape: Any, **kwargs: Any
    ) -> torch.Tensor:
        if shape and not isinstance(shape[0], torch.dtype):
            first, *rest = shape[0] if isinstance(shape[0], (tuple, list)) else shape
            if first == self._samples and not kwargs:
                return function(input, (self._rows.stop - self._rows.start, *rest))
        return function(input, *shape, **kwargs)

    @property
    def _rows(self) -> range:
        (lane,) = self._flow.lanes.mine
        return share_of(lane, self._flow.grid.lanes, self._samples).rows

    def _dropout(
        self,
        function: Callable[..., torch.Tensor],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return function(input, p, training, inplace)
        rows = self._rows
        whole = input.new_zeros((self._samples, *input.shape[1:]))
        whole[rows.start : rows.stop] = input
        return function(whole, p, True)[rows.start : rows.stop]

"""The ways to compute a call: on tiles, on channels, on shares. All give the same, or refuse.

Of tiles and channels all shards are in this process. Which tensors are cut is a part of the way:
the first argument alone, or every tensor that looks like a batch of as many samples, weights too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Axes
from farandole.layout.tiles.core.tile import Tile, cut
from tests.layout.oracle.apart import Shares
from tests.layout.oracle.calls import Found, run
from tests.layout.oracle.database import Given, is_batch
from tests.layout.tiles.checks import flow_of, whole


class Way(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def together(self) -> bool:
        """Whether all tensors that may be batches are divided."""

    def __call__(self, call: Callable[..., Any], given: Given) -> Found: ...


class Cut(NamedTuple):
    """A grid, and what divides a tensor of some dimensions."""

    name: str
    tiles: tuple[int, ...]
    channels: int
    axes: Callable[[int], Axes]
    together: bool = False

    def __call__(self, call: Callable[..., Any], given: Given) -> Found:
        flow, handed_off = flow_of(self.tiles, self.channels)
        flow.layer = "the layer"
        return run(call, given, lambda tensors: self._cut(flow, tensors), _whole, handed_off)

    def _cut(self, flow: Flow, tensors: list[Tensor]) -> list[Tensor]:
        samples = tensors[0].shape[0]
        return [
            cut(flow, each, self.axes(each.dim() - 1))
            if at == 0 or (self.together and is_batch(each) and each.shape[0] == samples)
            else each
            for at, each in enumerate(tensors)
        ]


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, Tile):
        return leaf
    (result,) = whole(leaf)
    assert result.shape == leaf.shape, f"a tile of {leaf.shape} is in truth {result.shape}"
    return result


def _last(count: int) -> Axes:
    """The image is what comes last."""
    image: Axes = (1, 2) if count > 1 else (2,)
    return (*(None,) * (count - len(image)), *image)


def _channels(count: int) -> Axes:
    return (0, *(None,) * (count - 1))


WAYS: tuple[Way, ...] = (
    Cut("tiles", (2, 2), 1, _last),
    Cut("tiles", (2, 2), 1, _last, together=True),
    Cut("tiles", (1, 3), 1, lambda count: (None,) * count),
    Cut("channels", (), 2, _channels),
    Cut("channels", (), 2, _channels, together=True),
    Shares(),
    Shares(together=True),
)

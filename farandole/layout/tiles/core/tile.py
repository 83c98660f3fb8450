"""`Tile`: a tensor of which every shard has a part, and which looks whole to the model.

A model runs on tiles without knowing it. Its shape is that of the whole tensor, so code that asks
for it goes on as before. Every function of torch that is called with a tile is looked up in a table
of those that can be computed exactly tile by tile. What is not in the table needs the whole image:
there the tiles are handed off (see `handoff`), or it is an error that names the layer.

A tensor that every shard has all of, such as a mean over the image, is a tile that no axis divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from farandole.layout.nested_tensors import tensors_of
from farandole.layout.recording.custom_functions import is_under_transform
from farandole.layout.tiles.core.flow import Flow, no_margin
from farandole.layout.tiles.core.grid import (
    Axes,
    Box,
    Margin,
    Needs,
    is_empty,
    relative,
    widest,
)
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.refusals import refuse_below
from farandole.layout.tiles.halo.exchange import gather, slices


class Divided(torch.Tensor):
    """A tensor of which every shard has a part, and which looks whole to the model."""

    flow: Flow

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        divided = divided_leaves((args, kwargs))
        flow = divided[0].flow
        if is_under_transform():
            raise refuse_below(flow, func)
        result = cls.handled(func, divided, args, kwargs)
        return flow.otherwise(flow, func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def handled(
        cls, func: Any, divided: Sequence[Divided], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a function of which this kind of tensor knows how shards compute it, each
        its part; NotImplemented: it does not know."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The wrapper has a shape and no memory. An operator that gets here has passed by the table
        # of functions, and there is nothing that it could compute with.
        raise refuse_below(divided_leaves((args, kwargs))[0].flow, func)


def divided_leaves(value: Any) -> list[Divided]:
    """Raises `UserError` if one of them must not be used any more."""
    found = [leaf for leaf in tensors_of(value) if isinstance(leaf, Divided)]
    for leaf in found:
        leaf.flow.check()
    return found


class Tile(Divided):
    """The parts of a tensor that the shards here have: `pieces`, one for each of them."""

    pieces: list[torch.Tensor]
    axes: Axes
    margin: Margin
    copied: bool
    """Whether it stands for a part of another tile without sharing its memory."""
    sources: frozenset[int]
    """While layers are recorded: the last windowed layers that it was computed from, by number; and
    `~number` of each layer that has read it, or read what it was computed from since."""

    @staticmethod
    def __new__(
        cls,
        flow: Flow,
        pieces: Sequence[torch.Tensor],
        sizes: Sequence[int],
        axes: Axes,
        margin: Margin | None = None,
    ) -> Tile:
        first = pieces[0]
        made: Tile = torch.Tensor._make_wrapper_subclass(
            cls, (first.shape[0], *sizes), dtype=first.dtype, device=first.device
        )
        made.flow = flow
        made.pieces = list(pieces)
        # Where the grid has one part, nothing is divided: said in one way only.
        made.axes = tuple(axis if flow.grid.is_divided(axis) else None for axis in axes)
        made.margin = no_margin(len(axes)) if margin is None else margin
        made.sources = frozenset()
        made.copied = False
        return made

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the whole tensor, without the batch."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.shape[1:])

    @property
    def rows(self) -> int:
        """How many samples there are."""
        return self.pieces[0].shape[0]

    def owned(self, shard: int) -> Box:
        return self.flow.grid.owned(shard, self.sizes, self.axes)

    def held(self, shard: int) -> Box:
        return self.flow.grid.held(shard, self.sizes, self.axes, self.margin)

    def own_pieces(self) -> list[torch.Tensor]:
        """Without the margin."""
        if not any(before or after for before, after in self.margin):
            return self.pieces
        return [
            piece[slices(relative(self.owned(shard), self.held(shard)))]
            for shard, piece in zip(self.flow.shards.mine, self.pieces, strict=True)
        ]

    def is_divided(self, dim: int) -> bool:
        """Whether shards have different parts along a dimension of the tensor."""
        return dim > 0 and self.flow.grid.is_divided(self.axes[dim - 1])

    @property
    def divided(self) -> bool:
        """Whether any shard lacks anything of it."""
        return any(self.is_divided(dim + 1) for dim in range(len(self.axes)))

    def like(self, pieces: Sequence[torch.Tensor]) -> Tile:
        """Other values in the same places."""
        made = Tile(self.flow, pieces, self.sizes, self.axes, self.margin)
        made.sources = self.sources
        return made

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Tile:
        return self.like([function(piece) for piece in self.pieces])

    def collect(self, needs: Sequence[Needs], fill: float = 0.0) -> list[torch.Tensor]:
        """What each shard needs (for all shards; runs of every axis), for those here.

        Nothing travels if every shard has it already. Outside of the tensor there is `fill`.
        """
        mine = self.flow.shards.mine
        if self.has_all(needs):
            return [
                _cut(piece, self.held(shard), tuple(run for (run,) in needs[shard]), fill)
                for shard, piece in zip(mine, self.pieces, strict=True)
            ]
        owned = [relative(self.owned(shard), self.held(shard)) for shard in mine]
        found = self.flow.copies(self.sizes, self.axes, tuple(needs))
        return gather(self.flow.shards, found, needs, self.pieces, owned, fill)

    def widen(self, margin: Margin) -> None:
        """From now on every shard has at least this margin of it."""
        wider = widest(self.margin, margin)
        if wider == self.margin:
            return
        grid = self.flow.grid
        # Differentiable, as `collect` is: the gradient of a margin goes back to its owner.
        boxes = [grid.held(shard, self.sizes, self.axes, wider) for shard in range(grid.shards)]
        self.pieces = self.collect([tuple((run,) for run in box) for box in boxes])
        self.margin = wider

    def has_all(self, needs: Sequence[Needs]) -> bool:
        """Whether every shard has what it needs inside of the tensor: then nothing has to
        travel."""
        # Decided for all shards, not for those here. Invariant: either every shard takes part in an
        # exchange or none does; one that others skip would wait for ever.
        return all(self._has(shard, needs[shard]) for shard in range(self.flow.grid.shards))

    def _has(self, shard: int, needs: Needs) -> bool:
        """Whether a shard has all that it needs inside of the tensor."""
        if any(len(axis) > 1 for axis in needs):
            return False
        box = tuple(
            run.meets(Interval(0, size)) for (run,), size in zip(needs, self.sizes, strict=True)
        )
        if is_empty(box):
            return True
        return all(mine.covers(wanted) for mine, wanted in zip(self.held(shard), box, strict=True))

    @classmethod
    def handled(
        cls, func: Any, divided: Sequence[Divided], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        flow = divided[0].flow
        handler = flow.handlers.get(func)
        if handler is None or not all(isinstance(leaf, Tile) for leaf in divided):
            return NotImplemented
        return handler(flow, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Tile({tuple(self.shape)} in {self.flow.grid})"


ABOUT = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_mkldnn.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_signed,
    torch.Tensor.is_inference,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__repr__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What is asked about a tensor as a whole, and answered for the whole."""


def _cut(piece: torch.Tensor, held: Box, wanted: Box, fill: float) -> torch.Tensor:
    """What is wanted of a piece that is held; beyond the tensor, where nobody has any: `fill`."""
    if wanted == held:
        return piece
    if is_empty(wanted):
        return empty_result(piece, (piece.shape[0], *(run.length for run in wanted)))
    inside = tuple(mine.meets(run) for mine, run in zip(held, wanted, strict=True))
    if is_empty(inside):
        part = empty_result(piece, (piece.shape[0], *(0 for _ in wanted)))
        around = [(0, run.length) for run in wanted]
    else:
        part = piece[slices(relative(inside, held))]
        around = [
            (mine.start - run.start, run.stop - mine.stop)
            for mine, run in zip(inside, wanted, strict=True)
        ]
    if not any(before or after for before, after in around):
        return part
    pads = [side for sides in reversed(around) for side in sides]
    return torch.nn.functional.pad(part, pads, value=fill)


def cut(flow: Flow, whole: torch.Tensor, axes: Axes) -> Tile:
    """The tile of a tensor that is here whole."""
    sizes = tuple(whole.shape[1:])
    mine = flow.shards.mine
    pieces = [whole[slices(flow.grid.owned(shard, sizes, axes))].contiguous() for shard in mine]
    if len(mine) > 1:  # what one shard changes in place is not another's, nor its version
        # `contiguous` makes no copy of a piece that is contiguous already.
        pieces = [piece.clone() if _is_view(piece, whole) else piece for piece in pieces]
    return Tile(flow, pieces, sizes, axes)


def _is_view(piece: torch.Tensor, whole: torch.Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def empty_result(source: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A result without elements, of a shard that owns nothing: it stays tied to its source, so that
    the backward pass comes by, where others wait for this shard. It is no view of the source, which
    would count as changed when the result is changed in place."""
    return source.reshape(-1)[:0].reshape(tuple(shape)).clone()

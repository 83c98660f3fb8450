"""`Tile`: a tensor of which every lane has a part, and which looks whole to the model.

A model runs on tiles without knowing it. Its shape is that of the whole tensor, so code that asks
for it goes on as before. Every function of torch that is called with a tile is looked up in a table
of those that can be computed exactly tile by tile. What is not in the table needs the whole image:
there the tiles are handed off (see `handoff`), or it is an error that names the layer.

A tensor that every lane has all of, such as a mean over the image, is a tile that no axis divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.layout.recording.custom_functions import is_under_transform
from farandole.layout.tiles.core.grid import (
    Axes,
    Box,
    Copy,
    Grid,
    Margin,
    Needs,
    copies,
    is_empty,
    relative,
    widest,
)
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.lanes import Lanes
from farandole.layout.tiles.halo.exchange import gather, slices

Handler = Callable[..., Any]
"""Computes a function of torch tile by tile: called with the flow and the function's arguments."""


class Windowed(NamedTuple):
    """A layer whose outputs look at windows, as it was met in a forward pass."""

    layer: str
    sizes: tuple[int, ...]  # of its output
    axes: Axes
    input_sizes: tuple[int, ...]
    input_axes: Axes
    needs: Callable[[Box], Box]  # what a part of its output needs of its input
    sources: frozenset[int]  # where its input comes from, see `Tile`
    position_bytes: int  # that all samples together have at one position of its input
    seconds: float  # that a lane took to compute what it owns


class Flow:
    """What the tiles of one model have in common: the lanes, the table, and where they are."""

    def __init__(
        self,
        lanes: Lanes,
        handlers: Mapping[Any, Handler],
        otherwise: Handler,
        row_handlers: Mapping[Any, Handler] = MappingProxyType({}),
    ) -> None:
        self.lanes = lanes
        self.handlers = handlers
        self.row_handlers = row_handlers  # of functions that treat samples one by one
        self.otherwise = otherwise
        """Called with the flow, a function that is in no table, its arguments and their names."""
        self.layer = "the input"  # where the model is, for whoever must name it
        self.margins: Sequence[Margin] = ()
        """How far beyond what it owns each windowed layer computes, in the order they are called;
        none: no further. What it computes beyond, the layers after it need not ask for."""
        self.windows = 0  # windowed layers since the forward began
        self.overlap = True  # whether a convolution computes while its halo is on the way
        self.record: list[Windowed] | None = None  # while it is found out which layers there are
        self.plans: dict[Any, Any] = {}
        """What layers have worked out about who computes what, by all that it follows from."""
        self._copies: dict[Any, list[Copy]] = {}

    @property
    def grid(self) -> Grid:
        return self.lanes.grid

    def check(self) -> None:
        """What has another flow instead must not be used any more, see `Spoiled`."""

    def begin(self) -> None:
        """A forward pass begins."""
        self.windows = 0

    def next_margin(self, axes: int) -> Margin:
        """Of the windowed layer that is computed now."""
        at, self.windows = self.windows, self.windows + 1
        return self.margins[at] if at < len(self.margins) else no_margin(axes)

    def copies(self, sizes: tuple[int, ...], axes: Axes, needs: tuple[Needs, ...]) -> list[Copy]:
        key = sizes, axes, needs
        if key not in self._copies:
            self._copies[key] = copies(self.grid, sizes, axes, needs)
        return self._copies[key]


class Divided(torch.Tensor):
    """A tensor of which every lane has a part, and which looks whole to the model."""

    flow: Flow

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise refuse_below(divided_leaves((args, kwargs))[0].flow, func)


def divided_leaves(value: Any) -> list[Divided]:
    """Raises `UserError` if one of them must not be used any more."""
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Divided)]
    for leaf in found:
        leaf.flow.check()
    return found


class Tile(Divided):
    """The parts of a tensor that the lanes here have: `pieces`, one for each of them."""

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

    def owned(self, lane: int) -> Box:
        return self.flow.grid.owned(lane, self.sizes, self.axes)

    def held(self, lane: int) -> Box:
        return self.flow.grid.held(lane, self.sizes, self.axes, self.margin)

    def own_pieces(self) -> list[torch.Tensor]:
        """Without the margin."""
        if not any(before or after for before, after in self.margin):
            return self.pieces
        return [
            piece[slices(relative(self.owned(lane), self.held(lane)))]
            for lane, piece in zip(self.flow.lanes.mine, self.pieces, strict=True)
        ]

    def is_divided(self, dim: int) -> bool:
        """Whether lanes have different parts along a dimension of the tensor."""
        return dim > 0 and self.flow.grid.is_divided(self.axes[dim - 1])

    @property
    def divided(self) -> bool:
        """Whether any lane lacks anything of it."""
        return any(self.is_divided(dim + 1) for dim in range(len(self.axes)))

    def like(self, pieces: Sequence[torch.Tensor]) -> Tile:
        """Other values in the same places."""
        made = Tile(self.flow, pieces, self.sizes, self.axes, self.margin)
        made.sources = self.sources
        return made

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Tile:
        return self.like([function(piece) for piece in self.pieces])

    def collect(self, needs: Sequence[Needs], fill: float = 0.0) -> list[torch.Tensor]:
        """What each lane needs (for all lanes; runs of every axis), for those here.

        Nothing travels if every lane has it already. Outside of the tensor there is `fill`.
        """
        mine = self.flow.lanes.mine
        if self.has_all(needs):
            return [
                _cut(piece, self.held(lane), tuple(run for (run,) in needs[lane]), fill)
                for lane, piece in zip(mine, self.pieces, strict=True)
            ]
        owned = [relative(self.owned(lane), self.held(lane)) for lane in mine]
        found = self.flow.copies(self.sizes, self.axes, tuple(needs))
        return gather(self.flow.lanes, found, needs, self.pieces, owned, fill)

    def widen(self, margin: Margin) -> None:
        """From now on every lane has at least this margin of it."""
        wider = widest(self.margin, margin)
        if wider == self.margin:
            return
        grid = self.flow.grid
        boxes = [grid.held(lane, self.sizes, self.axes, wider) for lane in range(grid.lanes)]
        self.pieces = self.collect([tuple((run,) for run in box) for box in boxes])
        self.margin = wider

    def has_all(self, needs: Sequence[Needs]) -> bool:
        """Whether every lane has what it needs inside of the tensor: then nothing has to travel."""
        return all(self._has(lane, needs[lane]) for lane in range(self.flow.grid.lanes))

    def _has(self, lane: int, needs: Needs) -> bool:
        """Whether a lane has all that it needs inside of the tensor."""
        if any(len(axis) > 1 for axis in needs):
            return False
        box = tuple(
            run.meets(Interval(0, size)) for (run,), size in zip(needs, self.sizes, strict=True)
        )
        if is_empty(box):
            return True
        return all(mine.covers(wanted) for mine, wanted in zip(self.held(lane), box, strict=True))

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
        handler = flow.handlers.get(func)
        if handler is None or not all(isinstance(leaf, Tile) for leaf in divided):
            return flow.otherwise(flow, func, args, kwargs)
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


def function_name(function: Any) -> str:
    """As a user knows it."""
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):  # of an attribute
        name = str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


def refuse(flow: Flow, function: Any) -> UserError:
    """For what would reach this lane's part alone, or a copy of it."""
    return UserError(
        f"{flow.layer}: {function_name(function)} is not possible with a tensor that is divided "
        "among workers: it would see or change this worker's part only. Write it as a function "
        "with a result, leave it away, or train this model without tiles."
    )


def refuse_below(flow: Flow, function: Any) -> UserError:
    """For what comes by another way than through the functions of torch that Python calls."""
    name = function_name(function).partition(".")[0]
    return UserError(
        f"{flow.layer}: {name} is computed inside of torch.func (vmap, grad, jvp), torch.jit, a "
        "subclass of torch.Tensor or a compiled extension, with a tensor that is divided among "
        "workers. These see a tensor's memory, and each worker has a part of it. Call torch's "
        "functions directly, end the tiles before this layer with handoff=…, or train this model "
        "without tiles."
    )


def refused(function: Any) -> Handler:
    """Of a function that cannot be called with a tile."""

    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        raise refuse(flow, function)

    return handler


class Spoiled:
    """Stands in for the flow of a divided tensor that must not be used any more."""

    def __init__(self, flow: Flow, function: Any) -> None:
        self._said = (
            f"{flow.layer}: {function_name(function)} has changed a tensor in place that is a view "
            "of another, which is divided among workers and is used again later. Write it as a "
            "function with a result (x = x + …, torch.relu(x))."
        )

    def check(self) -> None:
        raise UserError(self._said)

    def __getattr__(self, name: str) -> Any:
        raise UserError(self._said)


def no_margin(axes: int) -> Margin:
    return ((0, 0),) * axes


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
    mine = flow.lanes.mine
    pieces = [whole[slices(flow.grid.owned(lane, sizes, axes))].contiguous() for lane in mine]
    if len(mine) > 1:  # what one lane changes in place is not another's, nor its version
        pieces = [piece.clone() if _is_view(piece, whole) else piece for piece in pieces]
    return Tile(flow, pieces, sizes, axes)


def _is_view(piece: torch.Tensor, whole: torch.Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def empty_result(source: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A result without elements, of a lane that owns nothing: it stays tied to its source, so that
    the backward pass comes by, where others wait for this lane. It is no view of the source, which
    would count as changed when the result is changed in place."""
    return source.reshape(-1)[:0].reshape(tuple(shape)).clone()

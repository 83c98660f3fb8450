"""`BatchShard`: a tensor of which every shard has other samples. It looks whole to the model.

Behind the tiles the samples of a batch are divided among the shards. What a shard has of them is a
type of its own, so that nothing has to be guessed: a plain tensor is whole, and the same on every
shard, be it a weight, a constant or a number.

    samples   a b c │ d e      shard 0 has a b c, shard 1 has d e
    rows      a₀ a₁ b₀ b₁ c₀ c₁ │ d₀ d₁ e₀ e₁      after view(-1, …): `factor` rows for each sample

Every function of torch that is called with such a tensor is looked up in a table of those that
treat samples one by one. For any other, all shards put the samples together and compute it whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.refusals import Invalidated
from farandole.layout.tiles.core.tile import Divided
from farandole.schedule import piece


class SampleRange(NamedTuple):
    """Which samples a shard has behind the tiles. A spare shard's samples count for nothing."""

    rows: range
    spare: bool


def sample_range(shard: int, shards: int, samples: int, gathers: bool = False) -> SampleRange:
    """A shard that no sample is left for has the first one too, and it counts zero times.

    `gathers`: the first shard has all samples, and the others none at all.
    """
    if gathers:
        return (
            SampleRange(range(0), spare=True) if shard else SampleRange(range(samples), spare=False)
        )
    # Invariant: the shares that are not spare hold every sample exactly once. A spare shard still
    # computes something, because it must make the same exchanges as the others.
    rows = piece(shard, shards, samples)
    return (
        SampleRange(rows, spare=False) if rows else SampleRange(range(min(1, samples)), spare=True)
    )


class RowSpans(NamedTuple):
    """Where the shards' rows are among all; `shard` is the one here."""

    shard: int
    shards: int
    samples: int
    factor: int

    @property
    def own_range(self) -> SampleRange:
        return self.range_of(self.shard)

    def range_of(self, shard: int) -> SampleRange:
        return sample_range(shard, self.shards, self.samples)

    def span(self, shard: int) -> slice:
        rows = self.range_of(shard).rows
        return slice(rows.start * self.factor, rows.stop * self.factor)

    def here(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard's rows of a tensor that every shard has whole."""
        return whole[self.span(self.shard)]


class BatchShard(Divided):
    """This shard's samples, `own`, of a tensor of so many; `factor` rows belong to each."""

    own: torch.Tensor
    samples: int
    factor: int
    source: weakref.ref[Divided] | None
    """What it is a copy of, where the plain model has one memory for both."""

    @staticmethod
    def __new__(cls, flow: Flow, own: torch.Tensor, samples: int, factor: int = 1) -> BatchShard:
        made: BatchShard = torch.Tensor._make_wrapper_subclass(
            cls, (samples * factor, *own.shape[1:]), dtype=own.dtype, device=own.device
        )
        made.flow, made.own, made.samples, made.factor = flow, own, samples, factor
        made.source = None
        return made

    @property
    def count(self) -> int:
        """How many rows all shards have together."""
        return self.samples * self.factor

    @property
    def spans(self) -> RowSpans:
        shards = self.flow.shards
        return RowSpans(shards.mine[0], shards.grid.shards, self.samples, self.factor)

    def like(self, own: torch.Tensor, factor: int | None = None) -> BatchShard:
        """Other values for the same samples."""
        return BatchShard(self.flow, own, self.samples, self.factor if factor is None else factor)

    def viewed(self, own: torch.Tensor, factor: int | None = None) -> BatchShard:
        """The same values in another shape, in the same memory if torch has left them there."""
        made = self.like(own, factor)
        if same_memory(own, self.own):
            # A view of a copy is a copy too: a write to it concerns the original as well.
            made.source = self.source
        return made

    def goes_with(self, other: BatchShard) -> bool:
        """Whether every shard has the same rows of both."""
        return self.samples == other.samples and self.factor == other.factor

    def changed(self, function: Any) -> None:
        """It was changed in place: so would be, in the plain model, what it is a copy of."""
        if self.source is not None:
            invalidate(self.source(), function)

    @classmethod
    def handled(
        cls, func: Any, divided: Sequence[Divided], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        handler = divided[0].flow.batch_handlers.get(func)
        if handler is None or not all(isinstance(leaf, BatchShard) for leaf in divided):
            return NotImplemented
        return handler(divided[0], func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Rows({tuple(self.shape)} of {self.samples} samples)"


def invalidate(value: Divided | None, function: Any) -> None:
    """Makes every later use of a tensor an error, because the plain model would have changed it."""
    if value is None or isinstance(value.flow, Invalidated):
        return
    value.flow = Invalidated(value.flow, function)  # type: ignore[assignment]
    if isinstance(value, BatchShard) and value.source is not None:
        invalidate(value.source(), function)


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes with every change in place."""
    return 0 if tensor.is_inference() else tensor._version


BatchHandler = Callable[[BatchShard, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a function for this shard's samples: called with the first of the shares among the
arguments, the function, and its arguments. Returns NotImplemented for what it does not know."""

"""`Rows`: a tensor of which every shard has other samples, and which looks whole to the model.

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
from farandole.layout.tiles.core.refusals import Spoiled
from farandole.layout.tiles.core.tile import Divided
from farandole.schedule import piece


class Share(NamedTuple):
    """Which samples a shard has behind the tiles. A spare shard's count for nothing."""

    rows: range
    spare: bool


def share_of(shard: int, shards: int, samples: int, gathers: bool = False) -> Share:
    """A shard that no sample is left for has the first one too, and it counts zero times.

    `gathers`: the first shard has all samples, and the others none at all.
    """
    if gathers:
        return Share(range(0), spare=True) if shard else Share(range(samples), spare=False)
    # Invariant: the shares that are not spare hold every sample exactly once. A spare shard still
    # computes something, because it must make the same exchanges as the others.
    rows = piece(shard, shards, samples)
    return Share(rows, spare=False) if rows else Share(range(min(1, samples)), spare=True)


class Spans(NamedTuple):
    """Where the shards' rows are among all; `shard` is the one here."""

    shard: int
    shards: int
    samples: int
    factor: int

    @property
    def share(self) -> Share:
        return self.share_of(self.shard)

    def share_of(self, shard: int) -> Share:
        return share_of(shard, self.shards, self.samples)

    def span(self, shard: int) -> slice:
        rows = self.share_of(shard).rows
        return slice(rows.start * self.factor, rows.stop * self.factor)

    def here(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard's rows of a tensor that every shard has whole."""
        return whole[self.span(self.shard)]


class Rows(Divided):
    """This shard's samples, `own`, of a tensor of so many; `factor` rows belong to each."""

    own: torch.Tensor
    samples: int
    factor: int
    source: weakref.ref[Divided] | None
    """What it is a copy of, where the plain model has one memory for both."""

    @staticmethod
    def __new__(cls, flow: Flow, own: torch.Tensor, samples: int, factor: int = 1) -> Rows:
        made: Rows = torch.Tensor._make_wrapper_subclass(
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
    def spans(self) -> Spans:
        shards = self.flow.shards
        return Spans(shards.mine[0], shards.grid.shards, self.samples, self.factor)

    def like(self, own: torch.Tensor, factor: int | None = None) -> Rows:
        """Other values for the same samples."""
        return Rows(self.flow, own, self.samples, self.factor if factor is None else factor)

    def viewed(self, own: torch.Tensor, factor: int | None = None) -> Rows:
        """The same values in another shape, in the same memory if torch has left them there."""
        made = self.like(own, factor)
        if same_memory(own, self.own):
            # A view of a copy is a copy too: a write to it concerns the original as well.
            made.source = self.source
        return made

    def goes_with(self, other: Rows) -> bool:
        """Whether every shard has the same rows of both."""
        return self.samples == other.samples and self.factor == other.factor

    def changed(self, function: Any) -> None:
        """It was changed in place: so would be, in the plain model, what it is a copy of."""
        if self.source is not None:
            spoil(self.source(), function)

    @classmethod
    def handled(
        cls, func: Any, divided: Sequence[Divided], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        handler = divided[0].flow.row_handlers.get(func)
        if handler is None or not all(isinstance(leaf, Rows) for leaf in divided):
            return NotImplemented
        return handler(divided[0], func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Rows({tuple(self.shape)} of {self.samples} samples)"


def spoil(value: Divided | None, function: Any) -> None:
    """The plain model would have changed this too: whoever uses it from now on is told so."""
    if value is None or isinstance(value.flow, Spoiled):
        return
    value.flow = Spoiled(value.flow, function)  # type: ignore[assignment]
    if isinstance(value, Rows) and value.source is not None:
        spoil(value.source(), function)


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes with every change in place."""
    return 0 if tensor.is_inference() else tensor._version


RowHandler = Callable[[Rows, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a function for this shard's samples: called with the first of the shares among the
arguments, the function, and its arguments. Returns NotImplemented for what it does not know."""

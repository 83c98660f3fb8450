"""The options of a layout in groups: what each part of the code reads of it.

`Layout` inherits all groups, so a caller gives every option as one keyword. A function that needs
a group says so by its type, and can be called with the whole layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from farandole.errors import UserError
from farandole.schedule.pipelines import STREAMS


class PerStage(tuple[int, ...]):
    """One number for each stage, written as a sum: `3+2+4`."""

    def __str__(self) -> str:
        return "+".join(map(str, self))


class Names(tuple[str, ...]):
    """Names, written as a sum: `layer1+layer2`."""

    def __str__(self) -> str:
        return "+".join(self)


class TileCounts(tuple[int, ...]):
    """Parts along each axis of an image, written as a product: `2x2`."""

    def __str__(self) -> str:
        return "x".join(map(str, self))


def _tile_counts(text: str) -> TileCounts:
    try:
        return TileCounts(int(part) for part in text.split("x"))
    except ValueError:
        raise UserError(f"tiles={text!r} is no grid, such as 2x2.") from None


def _per_stage(text: str) -> PerStage:
    try:
        return PerStage(int(part) for part in text.split("+"))
    except ValueError:
        raise UserError(f"{text!r} is not a sum of whole numbers, such as 3+2+4.") from None


def _names(text: str) -> Names:
    return Names(text.split("+"))


def _number_or_auto(name: str, text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is neither a whole number nor auto.") from None


def _stages(text: str) -> int | Literal["auto"]:
    return _number_or_auto("stages", text)


def _halo(text: str) -> int | Literal["auto"]:
    return _number_or_auto("halo", text)


@dataclass(frozen=True)
class StageOptions:
    """How the model is cut into stages, and in which order they compute."""

    stages: int | Literal["auto"] = field(default=1, metadata={"parse": _stages})
    """Parts that the model is cut into; `auto`: as many, on as many ranks each, as is fastest."""
    microbatches: int = 1  # parts that each batch is cut into
    schedule: str = "1f1b"  # one of `schedule_names()`
    balance: tuple[int, ...] = field(default=(), metadata={"parse": _per_stage})
    """Blocks of each stage; none: found by measuring."""
    cuts: tuple[str, ...] = field(default=(), metadata={"parse": _names})
    """Submodules where a block may begin, for models that are no sequence; none: found."""
    replicas: tuple[int, ...] = field(default=(), metadata={"parse": _per_stage})
    """Ranks of each stage, which take turns; none: one each."""
    chunks: int = 2  # interleaved: stages on each rank
    bidirectional: bool = False  # two copies of the model, in opposite directions (GEMS)
    pairs: int = 1  # bidirectional: how often the two directions take turns in a step

    @property
    def mirrored(self) -> bool:
        """Whether there are two copies of the model, in opposite directions."""
        return self.bidirectional or self.schedule == "gems"

    @property
    def streams(self) -> bool:
        """Whether a step begins before the one before it has ended."""
        return self.schedule in STREAMS

    @property
    def turns(self) -> int:
        """How often the two directions take turns in a step."""
        return max(1, self.microbatches // 2) if self.schedule == "gems" else self.pairs


@dataclass(frozen=True)
class RecomputeOptions:
    """What is kept of the activations between a forward and its backward, and where."""

    recompute: bool = False  # activations are computed again instead of kept
    recompute_blocks: int = 0  # with recompute: blocks at a time; 0: all of a stage
    offload: bool = False  # what the backward needs waits in the host's memory


@dataclass(frozen=True)
class BatchOptions:
    """What micro-batches have to be put together to, so that they stand for the batch."""

    batchnorm: Literal["micro", "deferred"] = "micro"
    """When running statistics move: with every micro-batch, or once a step."""
    reduction: Literal["mean", "sum"] = "mean"  # what the loss does over the samples of a batch


@dataclass(frozen=True)
class WeightOptions:
    """Which versions of its weights a rank holds, and how much memory it has for all it holds."""

    vertical: bool = False  # pipedream: all stages use the weights that the first one had
    stash: bool = True  # pipedream: a backward uses the weights of its forward
    memory_gib: float | None = None  # what a rank may use; the cut must fit


@dataclass(frozen=True)
class TileOptions:
    """How images and channels are divided, and how the parts exchange what they need."""

    tiles: tuple[int, ...] = field(default=(), metadata={"parse": _tile_counts})
    """Parts that the image is cut into, along each of its axes: rows and columns, say."""
    channels: int = 1  # parts that the channels of every layer are cut into
    tiled: int = 0  # stages that have a rank for every tile; the others have one. 0: all have
    handoff: str = ""  # the submodule where tiles end; none: the first that cannot be tiled
    halo: int | Literal["auto"] = field(default="auto", metadata={"parse": _halo})
    """Layers for which neighbours exchange once; `auto`: as many as is fastest."""
    overlap: bool = True  # a convolution computes while its halo is on the way
    in_turn: bool = False  # one rank visits all tiles of a stage in turn

    @property
    def shards(self) -> int:
        """Into how many parts every tensor of the tiled stages is cut."""
        return math.prod(self.tiles) * self.channels


# Dataclasses collect fields from the last base to the first: `stages` is the first option.
@dataclass(frozen=True)
class LayoutOptions(TileOptions, WeightOptions, BatchOptions, RecomputeOptions, StageOptions):
    """All options of a layout. They are not checked here; `Layout` does that."""

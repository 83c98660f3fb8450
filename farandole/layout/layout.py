"""`Layout`: where one replica of the model lives. A frozen dataclass with a text form.

It can be read, compared, printed and planned with, without torch and without building anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from farandole.errors import UserError, nearest
from farandole.layout.rules import check_combination, check_numbers
from farandole.options import format_options, parse_options, require_choices
from farandole.schedule.pipelines import (
    STREAMS,
    Pipeline,
    Stream,
    build,
    schedule_names,
    stream,
)


class Sum(tuple[int, ...]):
    """One number for each stage, written as a sum: `3+2+4`."""

    def __str__(self) -> str:
        return "+".join(map(str, self))


class Names(tuple[str, ...]):
    """Names, written as a sum: `layer1+layer2`."""

    def __str__(self) -> str:
        return "+".join(self)


class Grid(tuple[int, ...]):
    """Parts along each axis of an image, written as a product: `2x2`."""

    def __str__(self) -> str:
        return "x".join(map(str, self))


def _grid(text: str) -> Grid:
    try:
        return Grid(int(part) for part in text.split("x"))
    except ValueError:
        raise UserError(f"tiles={text!r} is no grid, such as 2x2.") from None


def _halo(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"halo={text!r} is neither a whole number nor auto.") from None


def _sum(text: str) -> Sum:
    try:
        return Sum(int(part) for part in text.split("+"))
    except ValueError:
        raise UserError(f"{text!r} is not a sum of whole numbers, such as 3+2+4.") from None


def _names(text: str) -> Names:
    return Names(text.split("+"))


def _stages(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"stages={text!r} is neither a whole number nor auto.") from None


@dataclass(frozen=True)
class Layout:
    """How one replica of the model is spread over ranks: `Layout(stages=4, microbatches=8)`."""

    stages: int | Literal["auto"] = field(default=1, metadata={"parse": _stages})
    """Parts that the model is cut into; `auto`: as many, on as many ranks each, as is fastest."""
    microbatches: int = 1  # parts that each batch is cut into
    schedule: str = "1f1b"  # one of `schedule_names()`
    balance: tuple[int, ...] = field(default=(), metadata={"parse": _sum})
    """Blocks of each stage; none: found by measuring."""
    cuts: tuple[str, ...] = field(default=(), metadata={"parse": _names})
    """Submodules where a block may begin, for models that are no sequence; none: found."""
    replicas: tuple[int, ...] = field(default=(), metadata={"parse": _sum})
    """Ranks of each stage, which take turns; none: one each."""
    chunks: int = 2  # interleaved: stages on each rank
    bidirectional: bool = False  # two copies of the model, in opposite directions (GEMS)
    pairs: int = 1  # bidirectional: how often the two directions take turns in a step
    recompute: bool = False  # activations are computed again instead of kept
    recompute_blocks: int = 0  # with recompute: blocks at a time; 0: all of a stage
    offload: bool = False  # what the backward needs waits in the host's memory
    batchnorm: Literal["micro", "deferred"] = "micro"
    """When running statistics move: with every micro-batch, or once a step."""
    reduction: Literal["mean", "sum"] = "mean"  # what the loss does over the samples of a batch
    vertical: bool = False  # pipedream: all stages use the weights that the first one had
    stash: bool = True  # pipedream: a backward uses the weights of its forward
    memory_gib: float | None = None  # what a rank may use; the cut must fit
    tiles: tuple[int, ...] = field(default=(), metadata={"parse": _grid})
    """Parts that the image is cut into, along each of its axes: rows and columns, say."""
    channels: int = 1  # parts that the channels of every layer are cut into
    tiled: int = 0  # stages that have a rank for every tile; the others have one. 0: all have
    handoff: str = ""  # the submodule where tiles end; none: the first that cannot be tiled
    halo: int | Literal["auto"] = field(default="auto", metadata={"parse": _halo})
    """Layers for which neighbours exchange once; `auto`: as many as is fastest."""
    overlap: bool = True  # a convolution computes while its halo is on the way
    in_turn: bool = False  # one rank visits all tiles of a stage in turn

    def __post_init__(self) -> None:
        for name, kind in (("balance", Sum), ("replicas", Sum), ("cuts", Names), ("tiles", Grid)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        require_choices(self, "layout")
        if self.schedule not in schedule_names():
            raise UserError(
                f"layout: schedule={self.schedule!r} is not a choice. "
                f"{nearest(self.schedule, schedule_names())}"
            )
        check_numbers(self)
        check_combination(self)

    @property
    def shards(self) -> int:
        """Into how many parts every tensor of the tiled stages is cut."""
        return math.prod(self.tiles) * self.channels

    @property
    def mirrored(self) -> bool:
        """Whether there are two copies of the model, in opposite directions."""
        return self.bidirectional or self.schedule == "gems"

    @property
    def streams(self) -> bool:
        """Whether a step begins before the one before it has ended."""
        return self.schedule in STREAMS

    @property
    def ranks(self) -> int:
        """How many ranks one replica takes."""
        return sum(self.group_sizes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """How many ranks share each place of the schedule: one, or one for each tile."""
        if self.stages == "auto":
            raise UserError("layout: stages=auto takes as many ranks as there are.")
        places = sum(self.replicas) or self.stages
        if self.schedule == "interleaved":
            places = self.stages // self.chunks
        ranks = 1 if self.in_turn else self.shards
        tiled = self.tiled or places
        return (ranks,) * tiled + (1,) * (places - tiled)

    @property
    def turns(self) -> int:
        """How often the two directions take turns in a step."""
        return max(1, self.microbatches // 2) if self.schedule == "gems" else self.pairs

    def pipeline(self, micros: int | None = None) -> Pipeline:
        """The schedule of one step, or of `micros` micro-batches if a batch has no more."""
        assert self.stages != "auto"
        assert not self.streams
        micros = self.microbatches if micros is None else micros
        if self.mirrored:
            base = "layer" if self.schedule == "gems" else self.schedule
            return build(base, self.stages, micros, pairs=max(1, min(self.turns, micros // 2)))
        return build(self.schedule, self.stages, micros, chunks=self.chunks, replicas=self.replicas)

    def stream(self) -> Stream:
        """The endless schedule of a scheme whose steps overlap."""
        assert self.stages != "auto"
        assert self.streams
        return stream(
            self.schedule,
            self.stages,
            self.microbatches,
            replicas=self.replicas,
            vertical=self.vertical,
            stash=self.stash,
        )

    def __str__(self) -> str:
        """The text form, as on the command line: `stages=4,microbatches=8`."""
        return format_options(self) or "stages=1"


def parse_layout(text: str) -> Layout:
    """The layout that `stages=4,microbatches=8,…` describes.

    Raises `UserError` with the nearest name for an unknown option or schedule.
    """
    for word in (part.strip() for part in text.split(",")):
        if word in schedule_names():
            raise UserError(f"layout {text!r}: write schedule={word}.")
    return parse_options(Layout, text, what="layout")

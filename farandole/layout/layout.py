"""`Layout`: where one replica of the model lives. A frozen dataclass with a text form.

It can be read, compared, printed and planned with, without torch and without building anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.errors import UserError, nearest
from farandole.layout.option_groups import LayoutOptions, Names, PerStage, TileCounts
from farandole.layout.rules import check_combination, check_numbers
from farandole.options import format_options, parse_options, require_choices
from farandole.schedule.pipelines import (
    Pipeline,
    Stream,
    build,
    schedule_names,
    stream,
)

_WRITTEN_AS = (
    ("balance", PerStage),
    ("replicas", PerStage),
    ("cuts", Names),
    ("tiles", TileCounts),
)
"""Options that are tuples, and the kind of tuple that writes them as a text form does."""


@dataclass(frozen=True)
class Layout(LayoutOptions):
    """How one replica of the model is spread over ranks: `Layout(stages=4, microbatches=8)`."""

    def __post_init__(self) -> None:
        for name, kind in _WRITTEN_AS:
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

"""When every rank does what, given what things cost; and how much of the time it waits."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.schedule.pipelines.actions import Pipeline
from farandole.schedule.pipelines.player import Costs, Span, play
from farandole.schedule.pipelines.text import draw


@dataclass(frozen=True)
class PipelineTimeline:
    """A pipeline that was played, with the time of every action."""

    pipeline: Pipeline
    spans: tuple[Span, ...]  # by rank, and in the order of its list

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """By rank, the time in forwards and backwards; updates are not counted as work."""
        busy = [0.0] * self.pipeline.ranks
        for span in self.spans:
            if span.action.kind != "U":
                busy[span.rank] += span.end - span.begin
        return tuple(busy)

    @property
    def idle_share(self) -> float:
        """The part of the time of all ranks in which they do not compute: the bubble."""
        if not self.seconds:
            return 0.0
        return 1 - sum(self.busy_seconds) / (self.seconds * self.pipeline.ranks)

    def draw(self, width: int = 100) -> str:
        """Text, one line for each rank, not wider than `width`."""
        return draw(self.pipeline, self.spans, width)


def simulate(pipeline: Pipeline, costs: Costs) -> PipelineTimeline:
    """Raises `ScheduleError` for a pipeline in which ranks wait for each other for ever."""
    spans: list[list[Span]] = [[] for _ in range(pipeline.ranks)]
    for span in play(pipeline, costs):
        spans[span.rank].append(span)
    return PipelineTimeline(pipeline, tuple(span for rank in spans for span in rank))

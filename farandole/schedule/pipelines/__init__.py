"""Pipeline schemes as pure data: what each rank does, in which order. No torch."""

from __future__ import annotations

from farandole.schedule.pipelines.actions import (
    Action,
    Kind,
    Pipeline,
    backward,
    forward,
    one_each,
    opposite,
    update,
)
from farandole.schedule.pipelines.catalog import (
    SCHEMES,
    STREAMS,
    Scheme,
    build,
    schedule_names,
    stream,
)
from farandole.schedule.pipelines.checker import check
from farandole.schedule.pipelines.facts import Facts, facts, peak_bytes
from farandole.schedule.pipelines.player import Costs, Span
from farandole.schedule.pipelines.simulator import PipelineTimeline, simulate
from farandole.schedule.pipelines.streams import Stream

__all__ = [
    "SCHEMES",
    "STREAMS",
    "Action",
    "Costs",
    "Facts",
    "Kind",
    "Pipeline",
    "PipelineTimeline",
    "Scheme",
    "Span",
    "Stream",
    "backward",
    "build",
    "check",
    "facts",
    "forward",
    "one_each",
    "opposite",
    "peak_bytes",
    "schedule_names",
    "simulate",
    "stream",
    "update",
]

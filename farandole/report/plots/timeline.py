"""A pipeline's schedule as a picture: a row for each rank, time to the right, gaps are waiting."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farandole.files import write_whole
from farandole.report.plots import drawing, render
from farandole.report.plots.palette import INK, LANES, Shade
from farandole.schedule.pipelines import Kind, PipelineTimeline, Span
from farandole.schedule.pipelines.text import holds_many, label

WIDTH_INCHES = 12.0
CHARACTERS_PER_INCH = 12  # of the names in the bars
BAR_HEIGHT = 0.8
LOOKS: tuple[tuple[Kind, Shade, str], ...] = (
    ("F", LANES[0], "forward"),
    ("B", LANES[1], "backward"),
    ("I", LANES[1], "backward of the input"),
    ("W", LANES[2], "backward of the weights"),
)
HATCH = "////"  # the second direction of GEMS: seen without colour vision


def draw_timeline(timeline: PipelineTimeline, path: Path) -> None:
    """Writes a PNG or an SVG, by the ending of `path`.

    Raises `UserError` for any other ending and `FarandoleError` when it cannot be written.
    """
    check_ending(path)
    write_whole(path, render.picture(path, lambda: figure(timeline), timeline.pipeline.name))


def check_ending(path: Path) -> str:
    return render.picture_kind(path, "a timeline")


def figure(timeline: PipelineTimeline) -> Figure:
    """For a file here, or for a page with `render.svg`."""
    drawn = drawing.new_figure(WIDTH_INCHES, 1.1 + 0.32 * timeline.pipeline.ranks)
    axes = drawn.subplots()
    for kind, shade, _ in LOOKS:
        for replica in range(len(timeline.pipeline.homes)):
            chosen = [s for s in timeline.spans if s.action[0] == kind and s.action[3] == replica]
            _bars(axes, chosen, shade, HATCH if replica else "")
    _updates(axes, timeline)
    _names(axes, timeline)
    axes.set_xlim(0, timeline.seconds or 1.0)
    axes.set_ylim(timeline.pipeline.ranks - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(timeline.pipeline.ranks), _ranks(timeline), color=INK.light)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel("time (seconds)", color=INK.light)
    _legend(drawn, timeline)
    return drawn


def _bars(axes: Axes, spans: list[Span], shade: Shade, hatch: str) -> None:
    # Pale inside, so that the names can be read on light and on dark.
    for fill, alpha in ((True, 0.3), (False, 1.0)):
        axes.barh(
            [span.rank for span in spans],
            [span.end - span.begin for span in spans],
            left=[span.begin for span in spans],
            height=BAR_HEIGHT,
            color=shade.light if fill else "none",
            edgecolor=shade.light,
            alpha=alpha,
            hatch=hatch if fill else "",
            linewidth=0.8,
        )


def _updates(axes: Axes, timeline: PipelineTimeline) -> None:
    spans = [span for span in timeline.spans if span.action.kind == "U"]
    axes.barh(
        [span.rank for span in spans],
        [span.end - span.begin for span in spans],
        left=[span.begin for span in spans],
        height=BAR_HEIGHT,
        color=INK.light,
        edgecolor=INK.light,  # a line where it takes no time
        linewidth=1.5,
        clip_on=False,
        zorder=3,
    )


def _names(axes: Axes, timeline: PipelineTimeline) -> None:
    """In the bars that have room for them."""
    many = holds_many(timeline.pipeline)
    inches_per_second = WIDTH_INCHES / (timeline.seconds or 1.0)
    for rank, action, begin, end in timeline.spans:
        name = label(action, many)
        if (
            action.kind != "U"
            and len(name) <= (end - begin) * inches_per_second * CHARACTERS_PER_INCH
        ):
            axes.text(
                (begin + end) / 2, rank, name, ha="center", va="center", color=INK.light, fontsize=8
            )


def _ranks(timeline: PipelineTimeline) -> list[str]:
    held = [timeline.pipeline.held(rank) for rank in range(timeline.pipeline.ranks)]
    return [f"rank {rank}, stage {'+'.join(map(str, stages))}" for rank, stages in enumerate(held)]


def _legend(drawn: Figure, timeline: PipelineTimeline) -> None:
    kinds = {span.action.kind for span in timeline.spans}
    entries = [
        Patch(facecolor=shade.light, edgecolor=shade.light, label=word)
        for kind, shade, word in LOOKS
        if kind in kinds
    ]
    if "U" in kinds:
        entries.append(Patch(color=INK.light, label="update"))
    if len(timeline.pipeline.homes) > 1:
        entries.append(
            Patch(facecolor="none", edgecolor=INK.light, hatch=HATCH, label="second direction")
        )
    drawn.legend(
        handles=entries,
        loc="outside upper left",
        ncols=len(entries),
        frameon=False,
        labelcolor=INK.light,
    )

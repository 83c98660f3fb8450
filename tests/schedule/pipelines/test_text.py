"""A timeline as text and as a picture."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import FarandoleError, UserError
from farandole.report.plots import render
from farandole.report.plots.timeline import draw_timeline, figure
from farandole.schedule.pipelines import Costs, Pipeline, PipelineTimeline, build, simulate, stream


def played(pipeline: Pipeline, forward: float = 1.0, backward: float = 2.0) -> PipelineTimeline:
    return simulate(pipeline, Costs.even(pipeline.stages, forward, backward))


def test_columns_are_aligned() -> None:
    assert played(build("1f1b", 3, 4)).draw().splitlines() == [
        "rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---|",
        "rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---|",
        "rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---|",
        "F forward, B backward, U or | update",
    ]


def test_the_scale_does_not_matter() -> None:
    pipeline = build("1f1b", 3, 4)
    assert played(pipeline, 0.003, 0.006).draw() == played(pipeline).draw()


def test_longer_numbers_get_more_room() -> None:
    line = played(build("layer", 1, 11), 1.0, 1.0).draw().splitlines()[0]
    assert line.startswith("rank 0  F0- B0- F1- ")
    assert line.endswith(" F10 B10|")


def test_where_there_is_little_room_letters_are_left() -> None:
    pipeline = build("1f1b", 2, 4)
    assert played(pipeline).draw(40).splitlines()[:2] == [
        "rank 0  F F     B0- F B1- F B2-   B3-|",
        "rank 1    F B0- F B1- F B2- F B3-|",
    ]
    assert played(pipeline).draw(25).splitlines()[:2] == [
        "rank 0  FF  B FB FB  B|",
        "rank 1   FB FB FB FB|",
    ]


def test_two_directions_and_the_stages_of_each_rank() -> None:
    first, second, *_, legend = played(build("layer", 2, 2, pairs=1)).draw().splitlines()
    assert first == "rank 0  stage 0+1  F0          B0--- f1 b1---      |"
    assert second == "rank 1  stage 0+1     F0 B0--- f1             b1---|"
    assert legend.endswith("small letters: the second direction")


def test_an_update_that_takes_time_is_drawn() -> None:
    costs = Costs((1.0,), (1.0,), update_seconds=2.0)
    assert simulate(build("gpipe", 1, 1), costs).draw().splitlines()[0] == "rank 0  F0 B0 U----"


def test_what_takes_no_time_is_no_trouble() -> None:
    timeline = played(build("gpipe", 2, 2), 0.0, 0.0)
    assert timeline.idle_share == 0.0
    assert timeline.draw().splitlines()[:2] == ["rank 0  |", "rank 1  |"]


PIPELINES = st.sampled_from(
    [
        build("1f1b", 5, 12),
        build("interleaved", 6, 5),
        build("zero-bubble", 4, 6),
        build("1f1b", 3, 5, pairs=2),
        stream("pipedream", 3, 1, replicas=(1, 2, 2)).unroll(7),
    ]
)


SECONDS = st.floats(0, 5, allow_subnormal=False)


@settings(max_examples=40)
@given(PIPELINES, st.integers(0, 200), SECONDS, SECONDS)
def test_no_line_is_too_long(pipeline: Pipeline, width: int, f: float, b: float) -> None:
    lines = played(pipeline, f, b).draw(width).splitlines()
    assert len(lines) == pipeline.ranks + 1
    assert max(map(len, lines[:-1])) <= max(width, 40)


# Pictures


@pytest.mark.parametrize(
    "pipeline",
    [
        build("layer", 3, 2, pairs=1),
        build("zero-bubble", 1, 60),
    ],
    ids=lambda pipeline: pipeline.name,
)
def test_files(pipeline: Pipeline, tmp_path: Path) -> None:
    timeline = played(pipeline)
    draw_timeline(timeline, tmp_path / "out.PNG")
    content = (tmp_path / "out.PNG").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">I", content[16:20])[0] == 1800, "pixels across"
    draw_timeline(timeline, tmp_path / "out.svg")
    drawing = ElementTree.fromstring((tmp_path / "out.svg").read_text())
    words = {"".join(element.itertext()).strip() for element in drawing.iter()}
    assert {"forward", "update", "time (seconds)"} <= words
    assert any(word.startswith("rank 0, stage 0") for word in words)
    assert ("F0" in words) == (pipeline.micros < 60), "where the bars have room for names"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.PNG", "out.svg"]


def test_every_action_has_a_bar() -> None:
    timeline = played(build("gpipe", 2, 3, pairs=1))
    (axes,) = figure(timeline).axes
    bars = {
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
        for bar in axes.patches
    }
    assert bars == {(span.rank, span.begin, span.end - span.begin) for span in timeline.spans}


def test_a_part_of_a_page() -> None:
    timeline = played(build("1f1b", 2, 2))
    assert 'aria-label="1f1b"' in render.svg(lambda: figure(timeline), "1f1b")


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    timeline = played(build("gpipe", 1, 1))
    with pytest.raises(UserError, match=r"out.pdf: a timeline is drawn as .png or .svg"):
        draw_timeline(timeline, tmp_path / "out.pdf")
    with pytest.raises(FarandoleError, match="No such file or directory"):
        draw_timeline(timeline, tmp_path / "nowhere" / "out.png")
    assert not list(tmp_path.iterdir())

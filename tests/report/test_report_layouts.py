"""Lanes with layouts in the report: told apart in every place, and shown with their facts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from farandole.report.history import History
from farandole.report.lane import Lane, labels
from farandole.report.plots.drawing import LONGEST_LABEL, short_labels
from farandole.report.sections import how_it_was_run
from farandole.report.standing import Results
from farandole.report.summary import headline, plain, summary_json, table

MakeLane = Callable[..., Lane]
PIPELINE = "stages=4,microbatches=8"


def bare(layout: str, sync: str = "") -> Lane:
    return Lane(sync, 4, "ok", History(), layout=layout)


def test_a_label_says_layout_and_strategy() -> None:
    lanes = [
        bare("whole"),
        bare(PIPELINE),
        bare("", "daso"),
        bare(PIPELINE, "daso"),
        bare(PIPELINE, "local:every=8"),
        bare(PIPELINE),
    ]
    assert labels(lanes) == [
        "whole",
        "stages=4,microbatches=8 (1)",
        "daso",
        "stages=4,microbatches=8 · daso",
        "stages=4,microbatches=8 · local:every=8",
        "stages=4,microbatches=8 (2)",
    ]


def test_plots_cut_a_long_label_where_options_still_differ() -> None:
    lanes = [
        bare("stages=4,microbatches=8,schedule=gpipe,recompute", "daso"),
        bare("stages=4,microbatches=8,schedule=2bw,recompute", "daso"),
    ]
    assert short_labels(Results(tuple(lanes))) == [
        "stage…chedule=gpipe,recompute · daso",
        "stage…,schedule=2bw,recompute · daso",
    ]
    alone = short_labels(Results((lanes[0],)))
    assert alone == ["stages=4,microbat…e,recompute · daso"], (
        "the middle, where nothing is at stake"
    )


def test_plots_number_what_no_cut_tells_apart() -> None:
    start, end = "a" * 50, "b" * 50
    lanes = (bare(f"cuts={start}1{end}"), bare(f"cuts={start}2{end}"))
    first, second = short_labels(Results(lanes))
    assert first.startswith("1: cuts=a")
    assert second.startswith("2: cuts=a")


OPTIONS = st.lists(
    st.sampled_from(["microbatches=8", "schedule=gpipe", "schedule=2bw", "recompute", "pairs=2"]),
    max_size=4,
)


@settings(max_examples=50)
@given(st.lists(OPTIONS, min_size=1, max_size=6))
def test_labels_in_plots_are_distinct_and_short(layouts: list[list[str]]) -> None:
    lanes = tuple(bare(",".join(["stages=4", *options]), "local:every=8") for options in layouts)
    shown = short_labels(Results(lanes))
    assert len(set(shown)) == len(lanes)
    assert max(map(len, shown)) <= LONGEST_LABEL


def test_the_terminal_has_the_whole_label(make_lane: MakeLane) -> None:
    long = "stages=4,microbatches=8,schedule=gpipe,recompute"
    lanes = [replace(make_lane("daso", [0.5, 0.9]), layout=long), make_lane("allreduce", [0.5])]
    shown = io.StringIO()
    Console(file=shown, width=80).print(table(lanes))
    lines = shown.getvalue().splitlines()
    width = next(line.index(" n ") for line in lines if "strategy" in line)
    assert f"{long}·daso" in "".join("".join(line[:width].split()) for line in lines)
    assert f"`{long} · daso`" in plain(headline(Results(tuple(lanes))))


def test_the_summary_has_what_was_given(make_lane: MakeLane) -> None:
    lanes = (
        replace(make_lane("", [0.9]), layout=PIPELINE),
        make_lane("daso", [0.8]),
    )
    records = json.loads(summary_json(Results(lanes)))["lanes"]
    assert [(lane["label"], lane["layout"], lane["sync"]) for lane in records] == [
        (PIPELINE, PIPELINE, None),
        ("daso", None, "daso"),
    ]


@pytest.mark.parametrize("sync", ["", "daso"])
def test_the_page_shows_the_layout_of_each_lane(make_lane: MakeLane, sync: str) -> None:
    """As the run itself wrote it down: a script may have one of its own."""
    lane = make_lane("daso", [0.9])
    start = {**lane.history.start, "layout": f"{PIPELINE},balance=3+2"}
    piped = replace(lane, sync=sync, layout=PIPELINE, history=replace(lane.history, start=start))
    page = how_it_was_run(Results((make_lane("allreduce", [0.9]), piped)))
    assert page.count("<dt>layout</dt>") == 1
    assert f"<dt>layout</dt><dd>{PIPELINE},balance=3+2</dd>" in page
    assert ("<dt>sync</dt><dd>daso</dd>" in page) == (not sync), "where the label does not say it"
    assert piped.history.layout == f"{PIPELINE},balance=3+2"
    assert lane.history.layout == ""

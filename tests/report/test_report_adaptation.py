"""What strategies decided: written by a run, read back, drawn and listed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.report.decisions import decisions
from farandole.report.history import read_history
from farandole.report.lane import Lane
from farandole.report.metrics import MetricsLog
from farandole.report.page import page, write_report
from farandole.report.plots import adaptation, render
from farandole.report.plots import curves as plots
from farandole.report.standing import Results
from farandole.report.summary import MOST_NOTES, summary_json

MakeLane = Callable[..., Lane]
HOSTILE = "</td></table><script>alert(1)</script>$\\frac{$ & _<b>\"'é漢\x00\x07\ud800"
ADACOMM = [(0.1, {"period": 16, "why": "start"}), (1.0, {"period": 8}), (2.0, {"period": 1})]
DASO = [
    (0.0, {"phase": "warm-up", "period": 1, "wait": 0}),
    (0.5, {"phase": "cycling", "period": 4, "wait": 1}),
    (1.5, {"phase": "cycling", "period": 2, "wait": 1, "why": "no 5 % better in 3 epochs"}),
    (2.5, {"phase": "cool-down", "period": 1, "wait": 0}),
]


@pytest.fixture
def lanes(make_lane: MakeLane) -> tuple[Lane, ...]:
    return (
        make_lane("allreduce", [0.1, 0.5, 0.9]),
        make_lane("local:every=8", [0.1, 0.5, 0.9], notes=[(0.2, {"period": 8})]),
        make_lane("adacomm", [0.1, 0.5, 0.9], notes=ADACOMM),
        make_lane("daso", [0.1, 0.5, 0.9], notes=DASO),
    )


def counters(at: float) -> dict[str, float]:
    samples, steps = int(100 * at), int(10 * at)
    return {
        "time": at,
        "samples": samples,
        "steps": steps,
        "waited_seconds": 0.5,
        "bytes_sent": 7,
    }


def drawn(figure: Figure) -> dict[str, Any]:
    (axes,) = figure.axes
    return {str(line.get_label()): line for line in axes.get_lines()}


def names_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def pieces_of(figure: Figure) -> list[tuple[float, float]]:
    """From where to where each piece of a bar reaches."""
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in patches]


def test_a_note_is_one_whole_line_and_is_read_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {"sync": "daso"})
    log.log(counters(2.0), {"loss": 0.5})
    log.note(counters(1.0), {"phase": "cycling", "period": 4, "loss": math.nan, "why": "a\nb"})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {
        "event": "sync",
        **counters(1.0),
        "sync": {"phase": "cycling", "period": 4, "loss": "nan", "why": "a\nb"},
    }
    log.close(counters(3.0))
    history = read_history(tmp_path / "metrics.jsonl")
    assert (history.finished, history.damage) == (True, ())
    (note,) = history.notes
    assert (note.time_seconds, note.samples, note.bytes_sent) == (1.0, 100, 7)
    assert (note.values["phase"], note.values["period"]) == ("cycling", 4.0)


def test_tensorboard_gets_the_numbers_of_a_note_by_samples(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {})
    for at, period in ((1.0, 16), (2.0, 8)):
        log.note(counters(at), {"period": period, "phase": "cycling"})
    log.close(counters(3.0))
    board = EventAccumulator(str(tmp_path)).Reload()
    assert board.Tags()["scalars"] == ["sync/period"]
    assert board.Tags()["tensors"] == [], "text is in metrics.jsonl alone"
    assert [(e.step, e.value) for e in board.Scalars("sync/period")] == [(100, 16), (200, 8)]


def test_without_notes_the_page_has_no_such_section(make_lane: MakeLane) -> None:
    assert decisions(Results((make_lane("allreduce", [0.1, 0.9]),))) == ""


def test_a_period_holds_until_the_next_decision_and_the_last_to_the_end(
    lanes: tuple[Lane, ...],
) -> None:
    figure = adaptation.periods(Results(lanes))
    lines = drawn(figure)
    assert {name for name in lines if "lane" in name} == {"lane 1", "lane 2", "lane 3"}
    assert all(line.get_drawstyle() == "steps-post" for line in lines.values())
    assert list(lines["lane 1"].get_xdata()) == [0.2, 3.0]
    assert list(lines["lane 2"].get_xdata()) == [0.1, 1.0, 2.0, 3.0]
    assert list(lines["lane 2"].get_ydata()) == [16, 8, 1, 1]
    assert list(lines["wait"].get_xdata()) == [0.0, 0.5, 2.5, 3.0]
    assert list(lines["wait"].get_ydata()) == [0, 1, 0, 0]
    assert lines["wait"].get_color() == lines["lane 3"].get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "local:every=8",
        "adacomm",
        "daso",
        "wait",
    ]


def test_a_lane_with_a_wait_and_no_period_is_drawn(make_lane: MakeLane) -> None:
    results = Results((make_lane("x", [0.1, 0.2], notes=[(0.5, {"wait": 2})]),))
    assert adaptation.has_steps(results)
    assert list(drawn(adaptation.periods(results))["wait"].get_ydata()) == [2, 2]


@pytest.mark.parametrize(
    ("periods", "scale"), [([16, 1], "symlog"), ([4, 1], "linear"), ([8], "linear"), ([], "linear")]
)
def test_periods_over_more_than_two_octaves_are_evenly_spaced(
    make_lane: MakeLane, periods: list[int], scale: str
) -> None:
    notes = [(float(at), {"period": period}) for at, period in enumerate(periods)]
    figure = adaptation.periods(Results((make_lane("x", [0.1, 0.2], notes=notes),)))
    assert figure.axes[0].get_yscale() == scale


def test_each_phase_is_a_piece_with_its_name(lanes: tuple[Lane, ...]) -> None:
    figure = adaptation.phases(Results(lanes))
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["daso"]
    assert names_of(figure) == ["warm-up", "cycling", "cool-down"]
    assert pieces_of(figure) == [(0.0, 0.5), (0.5, 2.5), (2.5, 3.0)]


@pytest.mark.parametrize("count", [1, 6])
def test_names_of_phases_stay_apart_and_inside(make_lane: MakeLane, count: int) -> None:
    notes = [(0.0, {"phase": "synchronous"}), (0.02, {"phase": "local"}), (1.98, {"phase": "end"})]
    name = "postlocal:every=8,first_epochs=30"
    lanes = tuple(make_lane(name, [0.1, 0.2], notes=notes) for _ in range(count))
    figure = adaptation.phases(Results(lanes))
    assert names_of(figure) == ["synchronous", "local", "end"] * count
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    frame = axes.get_window_extent()
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])
    for box in boxes:
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1


def test_phases_too_many_to_tell_apart_are_one_piece(make_lane: MakeLane) -> None:
    notes = [(at / 1000, {"phase": f"p{at}"}) for at in range(1000)]
    figure = adaptation.phases(Results((make_lane("x", [0.1, 0.2], notes=notes),)))
    assert pieces_of(figure) == [(0.0, 0.999), (0.999, 2.0)]
    assert names_of(figure) == ["…", "p999"]


def test_bytes_over_time_have_the_moments_of_the_notes(make_lane: MakeLane) -> None:
    lane = make_lane("x", [0.1, 0.2], notes=[(0.5, {"period": 8}), (1.5, {"period": 4})])
    line = drawn(plots.bytes_over_time(Results((lane,))))["lane 0"]
    assert list(line.get_xdata()) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert list(line.get_ydata()) == [0, 500, 1000, 1500, 2000, 2000]


def test_every_decision_is_in_a_table_with_its_reason_last(make_lane: MakeLane) -> None:
    notes = [(0.5, {"why": "start", "period": 16, "odd key": "<odd>"}), (1.25, {"period": 7.5})]
    html = decisions(Results((make_lane("adacomm", [0.1, 0.2], notes=notes),)))
    assert "<code>adacomm</code>, 2 decisions</summary>" in html
    head = "<th>time (s)</th><th>step</th><th>period</th><th>odd key</th>"
    assert f'<tr>{head}<th class="words">why</th></tr>' in html
    assert (
        "<td>0.500</td><td>5</td><td>16</td><td>&lt;odd&gt;</td>"
        '<td class="words">start</td></tr>' in html
    )
    assert '<td>1.250</td><td>12</td><td>7.5</td><td></td><td class="words"></td></tr>' in html
    assert "<details open" not in html


def test_long_tables_and_summaries_keep_the_last_and_say_so(make_lane: MakeLane) -> None:
    notes = [(at / 1000, {"loss": float(at)}) for at in range(MOST_NOTES + 7)]
    results = Results((make_lane("x", [0.1, 0.2], notes=notes),))
    html = decisions(results)
    assert html.count("<tr>") == MOST_NOTES + 1
    assert f"The last {MOST_NOTES} of {MOST_NOTES + 7} decisions" in html
    (lane,) = json.loads(summary_json(results))["lanes"]
    assert (len(lane["notes"]), lane["notes_left_out"]) == (MOST_NOTES, 7)
    assert lane["notes"][0] == {"time": 0.007, "steps": 0, "values": {"loss": 7.0}}


def test_summary_has_the_notes_and_survives_what_is_not_finite(make_lane: MakeLane) -> None:
    notes = [(0.5, {"phase": "cycling", "period": 4, "loss": math.nan, "wait": -math.inf})]
    lanes = (make_lane("daso", [0.1], notes=notes), make_lane("serial", [0.05]))
    first, second = json.loads(summary_json(Results(lanes)))["lanes"]
    values = {"phase": "cycling", "period": 4, "loss": "nan", "wait": "-inf"}
    assert first["notes"] == [{"time": 0.5, "steps": 5, "values": values}]
    assert (first["notes_left_out"], second["notes"], second["notes_left_out"]) == (0, [], 0)


def test_hostile_text_in_notes_is_shown_and_not_obeyed(make_lane: MakeLane, tmp_path: Path) -> None:
    values = {"phase": HOSTILE, "period": HOSTILE, "wait": HOSTILE, "why": HOSTILE, HOSTILE: 1.0}
    lane = make_lane(HOSTILE, [0.1, 0.2], notes=[(0.5, values), (1.0, {"phase": "_$x_1$"})])
    path = write_report(tmp_path, [lane], None, {})
    html = path.read_text("utf-8")
    assert html.count("<script") == 2, "the page's own, and its data"
    assert unescape(html).count(HOSTILE.replace("\ud800", "?")) >= 5
    text = [e.text for e in ElementTree.fromstring(_svg(html, "phases over time")).iter("text")]
    assert "_$x_1$" in text
    assert "2 values could not be drawn" in html
    json.loads((tmp_path / "summary.json").read_text("utf-8"))


def _svg(html: str, title: str) -> str:
    at = html.index(f'aria-label="{title}"')
    return html[html.rindex("<svg", 0, at) : html.index("</svg>", at) + len("</svg>")]


def test_what_is_no_number_of_steps_is_a_gap(make_lane: MakeLane) -> None:
    wild = [4, math.nan, -3, math.inf, 1e300, "eight", 2]
    notes = [(at / 4, {"period": value}) for at, value in enumerate(wild)]
    results = Results((make_lane("x", [0.1, 0.2], notes=notes),))
    heights = drawn(adaptation.periods(results))["lane 0"].get_ydata()
    assert [height for height in heights if not math.isnan(height)] == [4, 2, 2]
    assert "5 values could not be drawn" in decisions(results)


any_value = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, 2.0, 1e19, 5e-324]),
    st.text(max_size=5),
)
any_note = st.tuples(
    st.one_of(st.floats(0, 4), st.floats(0, 9e19)),
    st.dictionaries(st.sampled_from(["period", "wait", "phase", "why", "x"]), any_value),
)


@given(st.lists(st.lists(any_note, max_size=4), max_size=3))
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a figure takes too long to shrink
)
def test_any_notes_can_be_shown(
    make_lane: MakeLane, runs: list[list[tuple[float, dict[str, float | str]]]]
) -> None:
    lanes = tuple(
        make_lane(str(at), [0.5], notes=sorted(notes, key=lambda note: note[0]))
        for at, notes in enumerate(runs)
    )
    results = Results(lanes)
    page(results, [decisions])
    summary_json(results)
    for draw in (adaptation.periods, adaptation.phases):
        ElementTree.fromstring(render.svg(lambda draw=draw: draw(results), "x"))  # type: ignore[misc]


def test_a_decision_undone_by_a_resumed_run_is_still_drawn(make_lane: MakeLane) -> None:
    lane = make_lane("x", [0.1], notes=[(0.5, {"period": 8}), (1.5, {"period": 4})])
    line = drawn(adaptation.periods(Results((lane,))))["lane 0"]
    assert list(line.get_xdata()) == [0.5, 1.5, 1.5]

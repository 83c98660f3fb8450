"""Reading `metrics.jsonl`, whole, torn, damaged and growing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.report import units
from farandole.report.history import Follower, History, read_history
from farandole.report.lane import Lane, outcome_of
from farandole.report.metrics import MetricsLog
from farandole.report.standing import Results
from farandole.report.summary import columns

START = {"event": "start", "name": "digits", "sync": "local:every=8", "size": 2, "seed": 0}


def log(at: float, **metrics: Any) -> dict[str, Any]:
    return {"event": "log", **counters(at), "metrics": metrics}


def note(at: float, **values: Any) -> dict[str, Any]:
    return {"event": "sync", **counters(at), "sync": values}


def counters(at: float) -> dict[str, Any]:
    samples = int(100 * at)
    return {
        "time": at,
        "samples": samples,
        "steps": int(at),
        "waited_seconds": at / 4,
        "bytes_sent": 7,
    }


def text_of(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_whole_run(path: Path) -> None:
    end = {"event": "end", **counters(3.5)}
    path.write_text(text_of(START, log(1.0, epoch=0, loss=0.5), log(2.0, accuracy=0.9), end))
    history = read_history(path)
    assert (history.sync, history.size, history.finished) == ("local:every=8", 2, True)
    assert history.metric_names == ("epoch", "loss", "accuracy")
    assert [point.metrics for point in history.points] == [
        {"epoch": 0, "loss": 0.5},
        {"accuracy": 0.9},
    ]
    assert [point.time_seconds for point in history.series("accuracy")] == [2.0]
    assert (history.last.time_seconds, history.last.samples) == (3.5, 350)
    assert history.damage == ()


def test_a_run_without_its_end_is_not_finished_and_ends_at_its_last_log(path: Path) -> None:
    path.write_text(text_of(START, log(1.0, loss=0.5)))
    history = read_history(path)
    assert not history.finished
    assert history.last.time_seconds == 1.0


def test_a_resumed_run_goes_on(path: Path) -> None:
    end = {"event": "end", **counters(2.0)}
    path.write_text(text_of(START, log(1.0, loss=0.5), end, {**START, "size": 4}))
    assert not read_history(path).finished, "it was started again"
    path.write_text(
        text_of(START, log(1.0, loss=0.5), {**START, "size": 4}, log(5.0, loss=0.4), end)
    )
    history = read_history(path)
    assert history.finished
    assert history.size == 4
    assert [point.time_seconds for point in history.points] == [1.0, 5.0]


@given(cut=st.integers(min_value=1))
@settings(max_examples=30, deadline=None)
def test_a_torn_last_line_is_skipped_wherever_it_was_cut(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    whole, last = text_of(START, log(1.0, loss=0.5)), json.dumps(log(2.0, loss=0.25, name="é"))
    raw = last.encode()
    path.write_bytes(whole.encode() + raw[: cut % len(raw)])
    history = read_history(path)
    assert [point.metrics["loss"] for point in history.points] == [0.5]
    assert history.damage == ()
    path.write_bytes(whole.encode() + raw)
    assert [point.metrics["loss"] for point in read_history(path).points] == [0.5, 0.25], (
        "a last line that is whole but for its newline counts"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event":"log","ti{"event":"start"}', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("\x00\x00", "not JSON"),
        ('{"event":"log","samples":1,"metrics":{}}', "'time' is None"),
        (json.dumps({**log(1.0), "samples": -3}), "'samples' is -3"),
        (json.dumps({**log(1.0), "time": "nan"}), "'time' is 'nan'"),
        (json.dumps({**log(1.0), "time": 10**400}), "'time' is 1000"),
        (json.dumps({**log(1.0), "metrics": 3}), "'metrics' is 3"),
        (json.dumps({"event": "sync", **counters(1.5)}), "'sync' is None"),
        (json.dumps({"event": "sync", **counters(1.5), "sync": [8]}), "'sync' is [8]"),
        (json.dumps({"event": "sync", "time": 9, "sync": {}}), "'samples' is None"),
    ],
)
def test_a_damaged_line_is_reported_by_number_and_costs_nothing_else(
    line: str, said: str, path: Path
) -> None:
    path.write_text(text_of(START, log(1.0, loss=0.5)) + line + "\n" + text_of(log(2.0, loss=0.4)))
    history = read_history(path)
    assert [point.metrics["loss"] for point in history.points] == [0.5, 0.4]
    assert len(history.damage) == 1
    assert history.damage[0].startswith("line 3: ")
    assert (history.notes, history.last.time_seconds) == ((), 2.0)
    assert said in history.damage[0]


def test_bytes_that_are_no_text_are_damage(path: Path) -> None:
    path.write_bytes(text_of(START).encode() + b'{"event": "log\xff"}\n' + text_of(START).encode())
    assert read_history(path).damage[0].startswith("line 2: not JSON")


def test_non_finite_metrics_come_back_and_text_is_passed_over(path: Path) -> None:
    path.write_text(
        text_of(log(1.0, a="nan", b="inf", c="-inf", d="warm-up", e=None, f=10**400, g=True))
    )
    metrics = read_history(path).points[0].metrics
    assert math.isnan(metrics["a"])
    assert dict(list(metrics.items())[1:]) == {
        "b": math.inf,
        "c": -math.inf,
        "f": math.inf,
        "g": 1.0,
    }


def test_unknown_events_and_blank_lines_are_passed_over(path: Path) -> None:
    path.write_text(text_of(START) + "\n" + text_of({"event": "period", "steps": 4}))
    history = read_history(path)
    assert (history.points, history.damage) == ((), ())


def test_notes_come_by_time_whenever_they_were_written(path: Path) -> None:
    late = [note(1.5, period=8), note(0.5, period=16, why="start")]
    path.write_text(text_of(START, log(2.0, loss=0.5), *late))
    history = read_history(path)
    assert [(n.time_seconds, n.steps, n.values) for n in history.notes] == [
        (0.5, 0, {"period": 16.0, "why": "start"}),
        (1.5, 1, {"period": 8.0}),
    ]
    assert len(history.points) == 1
    assert history.metric_names == ("loss",)
    assert history.last.time_seconds == 2.0, "a note from before does not set the run back"


def test_a_note_shows_how_far_a_run_is_and_never_that_it_ended(path: Path) -> None:
    path.write_text(text_of(START, log(1.0, loss=0.5), note(3.0, period=8)))
    history = read_history(path)
    assert (history.last.time_seconds, history.last.samples) == (3.0, 300)
    assert not history.finished
    end = {"event": "end", **counters(4.0)}
    path.write_text(text_of(START, log(1.0, loss=0.5), end, note(3.0, period=8)))
    history = read_history(path)
    assert history.finished, "nor does it take the end back"
    assert history.last.time_seconds == 4.0


def test_values_of_a_note_are_numbers_and_text(path: Path) -> None:
    values = {"a": "nan", "b": "-inf", "c": 10**400, "d": "warm-up", "e": None, "f": [1]}
    path.write_text(text_of(note(1.0, **values)))
    (only,) = read_history(path).notes
    assert math.isnan(float(only.values["a"]))
    assert dict(list(only.values.items())[1:]) == {"b": -math.inf, "c": math.inf, "d": "warm-up"}


def test_a_missing_file_says_where_it_was_looked_for(path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl.*run\.log"):
        read_history(path)


def test_an_empty_file_is_a_run_that_has_logged_nothing(path: Path) -> None:
    path.write_text("")
    history = read_history(path)
    assert (history.sync, history.size, history.points) == ("?", 0, ())


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=30, deadline=None)
def test_following_in_any_pieces_ends_where_reading_at_once_does(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("follow") / "metrics.jsonl"
    decided = note(0.5, phase="warm-up é", period=4)
    first, second = text_of(START, log(1.0, loss=0.5)), text_of(decided, log(2.0, é=1))
    whole = (first + "damaged\n" + second).encode()
    follower = Follower(path)
    assert follower.poll().points == ()
    seen = 0
    for cut in sorted(min(cut, len(whole)) for cut in [*cuts, len(whole)]):
        with path.open("ab") as file:
            file.write(whole[path.stat().st_size : cut])
        count = len(follower.poll().points)
        assert count >= seen
        seen = count
    assert follower.poll() == read_history(path)
    assert follower.poll().damage == ("line 3: not JSON: damaged",)
    assert [note.values["period"] for note in follower.poll().notes] == [4.0]


def test_following_parses_each_byte_once(path: Path) -> None:
    path.write_text(text_of(START, log(1.0, loss=0.5)))
    follower = Follower(path)
    follower.poll()
    # Spoil what has been read already, without changing its length: a second reading would notice.
    path.write_text("x" * len(path.read_text()) + text_of(log(2.0, loss=0.4)))
    history = follower.poll()
    assert [point.metrics["loss"] for point in history.points] == [0.5, 0.4]
    assert history.damage == ()


def test_a_file_that_became_shorter_is_read_afresh(path: Path) -> None:
    path.write_text(text_of(START, log(1.0, loss=0.5), log(2.0, loss=0.4)))
    follower = Follower(path)
    follower.poll()
    path.write_text(text_of(log(1.0, loss=0.9)))
    assert [point.metrics["loss"] for point in follower.poll().points] == [0.9]


def test_outcome_and_measures_of_a_run(path: Path) -> None:
    path.write_text(text_of(START, log(2.0, loss=0.5)))
    history = read_history(path)
    assert outcome_of(history, None) == "running"
    assert outcome_of(history, 0) == "unfinished"
    assert outcome_of(history, -9) == "failed"
    path.write_text(text_of(START, log(2.0, loss=0.5), {"event": "end", **counters(4.0)}))
    lane = Lane("local", 2, outcome_of(read_history(path), 0), read_history(path))
    assert lane.outcome == "ok"
    assert (lane.total_seconds, lane.samples_per_second, lane.waited_seconds) == (4.0, 100.0, 1.0)
    assert (lane.waited_share, lane.bytes_sent) == (0.25, 7)


def test_memory_of_gpus(path: Path) -> None:
    def memory(*peaks: object) -> dict[str, Any]:
        return {"event": "memory", "gpu_peak_bytes": peaks}

    path.write_text(text_of(START, memory(3 * 2**30, 2), log(1.0), memory(3 * 2**30, 5)))
    lane = Lane("local", 2, "ok", read_history(path))
    assert lane.history.gpu_peak_bytes == (3 * 2**30, 5)
    results = Results((lane, Lane("serial", 1, "ok", History())), None)
    (column,) = [each for each in columns(results, results.standings) if each.short == "GPU"]
    assert set(column.cells) == {"3 GiB", units.NONE}
    path.write_text(text_of(START, memory(1, 2), START, memory("x"), memory(-1), log(1.0)))
    history = read_history(path)
    assert history.gpu_peak_bytes == ()
    assert len(history.damage) == 2
    results = Results((Lane("local", 2, "ok", history),), None)
    assert "GPU" not in [each.short for each in columns(results, results.standings)]


def test_a_resumed_log_is_not_glued_to_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "start", "sync": "a"}\n{"event": "lo')
    log = MetricsLog(tmp_path, {"sync": "b"}, resumed=True)
    log.close({"time": 1.0, "samples": 0, "steps": 0, "waited_seconds": 0.0, "bytes_sent": 0})
    history = read_history(tmp_path / "metrics.jsonl")
    assert history.sync == "b"
    assert history.finished
    assert len(history.damage) == 1

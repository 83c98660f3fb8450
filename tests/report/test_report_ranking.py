"""Who won, in the ranking, in the headline, in the table and in the summary."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from farandole.errors import UserError
from farandole.report.lane import Lane
from farandole.report.standing import Results, Standing, choose_goal, rank, require_metric
from farandole.report.summary import headline, plain, summary_json, table
from farandole.report.target import Target

MakeLane = Callable[..., Lane]
TARGET = Target.parse("accuracy=0.9")


def order(lanes: Sequence[Lane], target: Target | None = TARGET) -> list[str]:
    return [standing.label for standing in rank(lanes, target)]


def said(*lanes: Lane, target: Target | None = TARGET) -> str:
    return plain(headline(Results(lanes, target)))


def test_sooner_wins_over_better_and_failed_comes_last(make_lane: MakeLane) -> None:
    lanes = [
        make_lane("crashed", [0.95, 0.99], outcome="failed"),
        make_lane("better", [0.5, 0.6, 0.99]),
        make_lane("never", [0.5, 0.89]),
        make_lane("sooner", [0.5, 0.91]),
        make_lane("stopped", [0.1, 0.2, 0.3, 0.9], outcome="unfinished"),
        make_lane("mute"),
    ]
    assert order(lanes) == ["sooner", "better", "stopped", "never", "mute", "crashed"]


def test_level_lanes_keep_the_order_given(make_lane: MakeLane) -> None:
    lanes = [make_lane("b", [0.5, 0.9]), make_lane("a", [0.5, 0.9]), make_lane("c", [0.5, 0.95])]
    assert order(lanes) == ["c", "b", "a"], "equally soon: the better value, then as given"
    assert order(lanes[::-1]) == ["c", "a", "b"]


def test_the_same_best_value_is_better_earlier(make_lane: MakeLane) -> None:
    assert order([make_lane("late", [0.1, 0.2, 0.8]), make_lane("early", [0.1, 0.8, 0.3])]) == [
        "early",
        "late",
    ]


def test_lower_is_better_for_a_loss(make_lane: MakeLane) -> None:
    lanes = [
        make_lane("high", [3.0, 2.0], metric="loss"),
        make_lane("low", [3, 1.0], metric="loss"),
    ]
    assert order(lanes, Target.parse("loss=0.1")) == ["low", "high"]
    assert order(lanes, None) == ["low", "high"]


@st.composite
def raced(draw: st.DrawFn) -> list[tuple[list[float], str]]:
    values = st.lists(st.sampled_from([0.1, 0.5, 0.9, 0.95, math.nan, math.inf]), max_size=5)
    outcome = st.sampled_from(["ok", "failed", "unfinished"])
    return draw(st.lists(st.tuples(values, outcome), min_size=1, max_size=6))


@given(raced(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_pair_stands_the_wrong_way_round(
    make_lane: MakeLane, runs: list[tuple[list[float], str]], with_target: bool
) -> None:
    lanes = [make_lane(str(at), values, outcome=o) for at, (values, o) in enumerate(runs)]
    standings = rank(lanes, TARGET if with_target else None)
    assert sorted(standing.index for standing in standings) == list(range(len(lanes)))
    assert [standing.place for standing in standings] == list(range(1, len(lanes) + 1))
    assert all(standing.lane is lanes[standing.index] for standing in standings)
    for above, below in pairwise(standings):
        assert not _better(below, above), (above, below)
        if not _better(above, below):
            assert above.index < below.index


def _better(one: Standing, other: Standing) -> bool:
    """The rule once more, written as a chain of questions instead of a key."""
    if (one.lane.outcome == "failed") != (other.lane.outcome == "failed"):
        return other.lane.outcome == "failed"
    if one.seconds_to_target != other.seconds_to_target:
        return other.seconds_to_target is None or (
            one.seconds_to_target is not None and one.seconds_to_target < other.seconds_to_target
        )
    if one.best != other.best:
        return other.best is None or (one.best is not None and one.best > other.best)
    return (one.best_seconds or 0) < (other.best_seconds or 0)


def test_speed_up_is_over_the_lane_given_first(make_lane: MakeLane) -> None:
    lanes = [
        make_lane("serial", [0.1, 0.9], seconds=4.0),
        make_lane("fast", [0.1, 0.9]),
        make_lane("never", [0.1, 0.2]),
    ]
    assert {s.label: s.speed_up for s in rank(lanes, TARGET)} == {
        "serial": 1.0,
        "fast": 4.0,
        "never": None,
    }
    assert {s.label: s.speed_up for s in rank(lanes[::-1], TARGET)} == dict.fromkeys(
        ("serial", "fast", "never")
    ), "the first lane never reached the target: nothing to compare with"
    by_throughput = rank([*lanes, make_lane("dead")], None)
    assert {s.label: s.speed_up for s in by_throughput} == {
        "serial": 1.0,
        "fast": 4.0,
        "never": 4.0,
        "dead": None,
    }


def test_without_a_target_the_first_metric_that_changes_ranks(make_lane: MakeLane) -> None:
    constant = make_lane("a", [1.0, 1.0], metric="weight")
    moving = make_lane("b", [0.3, 0.2], metric="val_loss")
    goal = choose_goal([constant, moving], None)
    assert goal is not None
    assert (goal.metric, goal.higher_is_better) == ("val_loss", False)
    only_constant = choose_goal([constant], None)
    assert only_constant is not None
    assert only_constant.metric == "weight"
    assert choose_goal([make_lane("c", [1.0], metric="Steps")], None) is None


def test_without_any_metric_throughput_ranks(make_lane: MakeLane) -> None:
    lanes = [
        make_lane("slow", [1, 2], metric="lr"),
        make_lane("fast", [1], metric="lr", seconds=0.5),
    ]
    assert order(lanes, None) == ["fast", "slow"]
    assert said(*lanes, target=None) == "No metric was logged; `fast` took in 200 samples/s."


def test_a_metric_nobody_logged_is_named_with_those_that_were(make_lane: MakeLane) -> None:
    history = make_lane(values=[0.5]).history
    with pytest.raises(UserError, match=r"never logged 'acuracy'.*logged: acc.*mean 'accuracy'"):
        require_metric(Target.parse("acuracy=0.9"), [history])
    require_metric(TARGET, [make_lane().history, history])
    with pytest.raises(UserError, match=r"logged nothing.*run\.log\(accuracy=\.\.\.\)"):
        require_metric(TARGET, [make_lane().history])
    require_metric(TARGET, [make_lane(outcome="failed").history])


def test_headline_compares_the_winner_with_the_first_lane(make_lane: MakeLane) -> None:
    serial = make_lane("serial", [0.1, 0.9], seconds=9.0)
    fast = make_lane("fast", [0.1, 0.9], seconds=5.0)
    slow = make_lane("slow", [0.1, 0.2], seconds=5.0)
    sentence = "`fast` reached accuracy ≥ 0.9 first, in 10.0 s; 1.8× sooner than `serial`."
    assert said(serial, fast, slow) == sentence
    assert said(fast, slow, serial) == sentence, "the winner was given first: over the runner-up"
    assert said(slow, fast) == (
        "`fast` reached accuracy ≥ 0.9 first, in 10.0 s; `slow` did not reach it (best 0.2)."
    )
    assert said(fast) == "`fast` reached accuracy ≥ 0.9, in 10.0 s."


def test_headline_does_not_call_what_is_too_close(make_lane: MakeLane) -> None:
    serial = make_lane("serial", [0.1, 0.9], seconds=9.0)
    one, two = (make_lane(name, [0.1, 0.9], seconds=s) for name, s in (("x", 5.0), ("y", 5.1)))
    close = "`y` took 10.2 s, too close to call from one run of each."
    assert said(one, two).endswith(f"; {close}")
    assert said(serial, one, two).endswith(f"; 1.8× sooner than `serial`; {close}")


def test_headline_when_nobody_reached_it_or_nobody_lived(make_lane: MakeLane) -> None:
    low, lower = make_lane("low", [0.5, 0.8]), make_lane("lower", [0.5, 0.7])
    dead, nan = make_lane("dead", outcome="failed"), make_lane("nan", [math.nan])
    assert said(lower, low) == (
        "No run reached accuracy ≥ 0.9; `low` came nearest, with 0.8 after 2.0 s."
    )
    assert said(low, dead) == "No run reached accuracy ≥ 0.9; `low` came to 0.8 after 2.0 s."
    assert said(lower, low, target=None) == "`low` had the best accuracy: 0.8 after 2.0 s."
    assert said(nan) == "No run logged a finite accuracy."
    assert said(dead, dead) == "All 2 runs failed."
    assert said(dead) == "`dead` failed."
    assert said() == "Nothing was raced."


def test_the_same_strategy_twice_gets_two_names(make_lane: MakeLane) -> None:
    lanes = [make_lane("daso", [0.9]), make_lane("serial", [0.5]), make_lane("daso", [0.2])]
    assert order(lanes) == ["daso (1)", "serial", "daso (2)"]


def drawn(lanes: Sequence[Lane], width: int = 120, **how: bool) -> str:
    console = Console(width=width, color_system=None, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(lanes, TARGET, **how))
    return capture.get()


def test_table_shows_the_numbers_best_first_or_as_given(make_lane: MakeLane) -> None:
    lanes = [
        make_lane("serial", [0.1, 0.9], seconds=4.0, workers=1),
        make_lane("[bold]fast", [0.1, 0.9]),
        make_lane("crashed", [0.1], outcome="failed"),
    ]
    text = drawn(lanes)
    assert text.index("[bold]fast") < text.index("serial") < text.index("crashed failed")
    row = next(line for line in text.splitlines() if "[bold]fast" in line)
    assert " ".join(row.split()) == "[bold]fast 2 2.0 s 0.9 4.00× 100 0.5 s 2 kB 2.0 s"
    assert "target: accuracy ≥ 0.9; speed-up: over serial" in text
    live = drawn(lanes, ranked=False)
    assert live.index("serial") < live.index("[bold]fast")


def test_table_fits_eighty_characters_without_cutting_numbers(make_lane: MakeLane) -> None:
    name = "allreduce:algorithm=ring,codec=int8,bucket_mib=0.05"
    text = drawn([make_lane(name, [0.1234, 0.9876], seconds=300.0)], width=80)
    assert "10 min 00 s" in text
    assert "0.9876" in text
    assert "…" not in text
    first_column = "".join(line.split(" ", 2)[1] for line in text.splitlines() if line.strip())
    assert name in first_column, "a long name is folded, and all of it is there"


def test_summary_has_the_unrounded_numbers_and_survives_what_is_not_finite(
    make_lane: MakeLane,
) -> None:
    lanes = (
        make_lane("serial", [0.1, math.nan, 0.912345678], seconds=4.0),
        make_lane("fast", [math.inf], outcome="failed", damage=("line 3: not JSON: x",)),
    )
    summary = json.loads(summary_json(Results(lanes, TARGET, {"machine": "two cores"})))
    assert summary["target"] == {"metric": "accuracy", "value": 0.9, "higher_is_better": True}
    assert summary["facts"] == {"machine": "two cores"}
    first, last = summary["lanes"]
    assert (first["sync"], first["place"], first["given"], first["outcome"]) == (
        "serial",
        1,
        1,
        "ok",
    )
    assert (first["best"], first["seconds_to_target"]) == (0.912345678, 12.0)
    assert (first["samples_per_second"], first["waited_share"]) == (25.0, 0.25)
    assert (first["bytes_sent"], first["total_seconds"], first["speed_up"]) == (3000, 12.0, 1.0)
    assert (last["sync"], last["best"], last["damage"]) == ("fast", None, ["line 3: not JSON: x"])


def test_a_race_in_which_nothing_was_logged_asks_for_it(make_lane) -> None:
    lanes = (
        make_lane("allreduce", outcome="unfinished"),
        make_lane("serial", outcome="unfinished"),
    )
    said = plain(headline(Results(lanes)))
    assert said == "No run logged anything: does the script call run.log(…)?"


def test_two_that_are_too_close_have_no_first(make_lane) -> None:
    lanes = (make_lane("a", [0.9], seconds=1.0), make_lane("b", [0.9], seconds=1.01))
    said = plain(headline(Results(lanes, Target("accuracy", 0.9, True))))
    assert "too close to call" in said
    assert "first" not in said

"""What a target says, which way it points, and when it is reached."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.report.history import History
from farandole.report.lane import Lane
from farandole.report.notice import TargetNotice
from farandole.report.target import Target, lower_is_better

MakeLane = Callable[..., Lane]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("accuracy=0.95", "accuracy ≥ 0.95"),
        (" accuracy = 95 ", "accuracy ≥ 95"),
        ("accuracy>=0.95", "accuracy ≥ 0.95"),
        ("accuracy≤0.5", "accuracy ≤ 0.5"),
        ("loss=0.3", "loss ≤ 0.3"),
        ("loss<=0.3", "loss ≤ 0.3"),
        ("loss≥-1e-3", "loss ≥ -0.001"),
        ("val/top 1=1e2", "val/top 1 ≥ 100"),
    ],
)
def test_the_direction_is_shown(text: str, shown: str) -> None:
    target = Target.parse(text)
    assert str(target) == shown
    assert Target.parse(str(target)) == target


MINIMISED = """loss val_loss train/loss logloss loss.total valLoss error top5_err mse RMSE mae
    wer perplexity ppl cross_entropy nll"""
MAXIMISED = "accuracy acc f1 auc bleu reward glossary_hits terrain_score lossless r2 mAP iou"


@pytest.mark.parametrize("name", MINIMISED.split())
def test_names_of_things_to_minimise(name: str) -> None:
    assert lower_is_better(name)


@pytest.mark.parametrize("name", MAXIMISED.split())
def test_names_of_things_to_maximise(name: str) -> None:
    assert not lower_is_better(name)


@pytest.mark.parametrize(
    "text", ["", "accuracy", "=0.95", "accuracy=", "accuracy>0.95", "a==1", "a<=b<=1", "accuracy:1"]
)
def test_malformed_targets_come_with_one_to_paste(text: str) -> None:
    with pytest.raises(UserError, match=r"--target accuracy=0\.95") as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["accuracy=high", "accuracy=nan", "loss<=inf", "accuracy=95%"])
def test_values_must_be_finite_numbers(text: str) -> None:
    with pytest.raises(UserError, match=r"not a finite number.*--target accuracy=0\.95"):
        Target.parse(text)


def test_reached_at_the_first_log_that_meets_it(make_lane: MakeLane) -> None:
    history = make_lane(values=[0.5, 0.95, 0.9, 0.99], seconds=2.0).history
    assert Target.parse("accuracy=0.95").reached(history) == 4.0
    assert Target.parse("accuracy<=0.9").reached(history) == 2.0
    assert Target.parse("accuracy=0.991").reached(history) is None
    assert Target.parse("recall=0.1").reached(history) is None


def test_a_value_that_is_not_finite_reaches_nothing(make_lane: MakeLane) -> None:
    history = make_lane(values=[math.inf, math.nan, -math.inf, 0.5]).history
    assert Target.parse("accuracy>=0.1").reached(history) == 4.0
    assert Target.parse("accuracy<=0.6").reached(history) == 4.0


@given(st.lists(st.floats(-1, 1)), st.floats(-1, 1), st.booleans())
def test_reached_agrees_with_looking_at_each_log(
    make_lane: MakeLane, values: list[float], value: float, higher: bool
) -> None:
    good = [v >= value if higher else v <= value for v in values]
    seconds = Target("accuracy", value, higher).reached(make_lane(values=values).history)
    assert seconds == (good.index(True) + 1 if any(good) else None)


def test_what_is_not_logged_is_said_once_and_taken_back_once(make_lane: MakeLane) -> None:
    """A script that logs its loss in every step, and its accuracy once in a while."""
    notice = TargetNotice(Target.parse("accuracy=0.9"))
    losses = make_lane("daso", [0.5, 0.4], metric="loss").history
    assert notice.look(History()) is None
    said = notice.look(losses)
    assert said is not None
    assert "asks for accuracy, and the script has logged loss. Known: loss." in said
    assert notice.look(losses) is None
    later = make_lane("daso", [0.8], seconds=7.0).history
    assert notice.look(later) == "accuracy was logged after 7.0 s: all is well."
    assert notice.look(later) is None
    assert notice.look(losses) is None, "of another lane: it will log it too"


def test_nothing_is_said_where_the_metric_is_logged_or_nothing_is_asked_for(
    make_lane: MakeLane,
) -> None:
    for target in (Target.parse("accuracy=0.9"), None):
        notice = TargetNotice(target)
        assert notice.look(make_lane("daso", [0.8]).history) is None
    assert notice.look(make_lane("daso", [0.8], metric="loss").history) is None

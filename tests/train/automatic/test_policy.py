"""`fd.Checkpoints` and its text form; what cannot be is refused by name."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

import farandole as fd
from farandole.errors import UserError
from farandole.train.checkpoint.automatic.durations import (
    read_seconds,
    show_seconds,
    write_seconds,
)
from farandole.train.checkpoint.automatic.policy import parse_checkpoints


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("every=10min", fd.Checkpoints(every="600 s")),
        ("every=500steps,keep=1", fd.Checkpoints(every="500 steps", keep=1)),
        ("every=auto,mtbf=6h", fd.Checkpoints(mtbf="360 minutes")),
        ("keep=5,best=accuracy", fd.Checkpoints(keep=5, best="accuracy")),
        (
            "to=s3://bucket/path,best=loss:min",
            fd.Checkpoints(to="s3://bucket/path", best="loss:min"),
        ),
    ],
)
def test_a_script_and_a_command_line_say_the_same(text: str, policy: fd.Checkpoints) -> None:
    assert parse_checkpoints(text) == policy
    assert parse_checkpoints(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10min", "write every=10min"),
        ("every=10", "number with its unit"),
        ("every=10parsecs", "'parsecs' is no unit of time"),
        ("every=0s", "must be a time above 0"),
        ("every=0steps", "whole number of steps"),
        ("every=1.5steps", "whole number of steps"),
        ("every=10min,mtbf=6h", "mtbf=6h is for every=auto"),
        ("every=auto,mtbf=6", "number with its unit"),
        ("keep=0", "keep=0 must be a whole number, 1 or more"),
        ("keep=many", "'many' is not a whole number"),
        ("best=:min", "names no metric"),
        ("best=score:most", "write score:max"),
        ("to=s3://me:secret@host/path", "contains a password"),
        ("evry=10min", "Did you mean 'every'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_checkpoints(text)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_number_without_a_unit_is_refused_in_a_script_too() -> None:
    with pytest.raises(UserError, match="every=300 has no unit"):
        fd.Checkpoints(every=300)  # type: ignore[arg-type]


def test_what_is_better_is_known_by_name_or_said() -> None:
    assert fd.Checkpoints(best="val_loss").lower_is_better
    assert not fd.Checkpoints(best="accuracy").lower_is_better
    assert fd.Checkpoints(best="score:min").lower_is_better
    assert not fd.Checkpoints(best="loss:max").lower_is_better
    assert fd.Checkpoints(best="loss:max").metric == "loss"


@hypothesis.given(st.integers(1, 10**7))
def test_times_are_read_as_they_are_written(seconds: int) -> None:
    assert read_seconds("every", write_seconds(float(seconds))) == seconds


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.253, "0.25 s"), (42.0, "42 s"), (200.0, "3 min 20 s"), (7200.0, "2 h"), (4e5, "4.63 days")],
)
def test_times_are_shown_rounded(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown

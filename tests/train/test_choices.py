"""`run.choose`: what a script gets, alone and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.errors import UserError
from farandole.train.choosing.choice import Choice


def make(space: Any, high: Any = None, **settings: Any) -> Choice:
    return Choice.make("x", space, high, has_default="default" in settings, **settings)


def test_without_anybody_to_decide_it_is_the_middle_or_the_first() -> None:
    assert make(1e-4, 1e-2, log=True).value() == pytest.approx(1e-3)
    assert make(1.0, 4.0).value() == 2.5
    assert make(1, 5).value() == 3
    assert make(16, 64, log=True).value() == 32
    assert make(0, 8, step=4).value() == 4
    assert make([64, 128]).value() == 64
    assert make(1, 5, default=4).value() == 4
    assert make([None, "cosine"], default="cosine").value() == "cosine"


@pytest.mark.parametrize(
    ("space", "high", "settings", "said"),
    [
        (1.0, 1.0, {}, "first bound must be below the second"),
        (0.0, 1.0, {"log": True}, "log=True needs bounds above 0"),
        (0, 5, {"step": 2}, "step=2 must lead from one bound to the other"),
        (1, None, {}, "give two bounds"),
        ("ab", None, {}, "give two bounds"),
        ([], None, {}, "at least one option"),
        ([1, "1"], None, {}, "told apart by how they are written"),
        ([1, 2], 3, {}, "no upper bound"),
        (1, 5, {"default": 7}, "7 is not one of 1 to 5"),
        (1, 5, {"default": 2.5}, "2.5 is not one of 1 to 5"),
    ],
)
def test_what_is_no_choice_is_refused(
    space: Any, high: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        make(space, high, **settings)
    assert said in str(refused.value)


def test_values_are_read_as_the_command_line_gives_them() -> None:
    assert make([64, 128]).read("128") == 128
    assert make([None, True]).read("True") is True
    assert make(1e-4, 1e-1).read("1e-3") == 1e-3
    for choice, text in ((make([64, 128]), "96"), (make(1, 5), "2.5"), (make(1.0, 5.0), "nan")):
        with pytest.raises(UserError, match=f"--choose x={text}: give one of"):
            choice.read(text)


def test_all_ranks_get_the_same_and_the_metrics_have_it(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import farandole as fd
run = fd.init()
rate = run.choose("rate", 0.001 if run.rank == 0 else 0.001, 1.0)
assert run.choose("rate", 0.001, 1.0) == rate
run.log(loss=1.0)
late = run.choose("late", ["a", "b"])
print("has", rate, late)
run.choose("rate", 0.01 * (1 + run.rank), 1.0)
""",
    )
    words = ("--choose", "rate=0.25", "--choose", "lade=b", "--name", "r")
    done = sandbox.farandole("run", "-n", "2", *words, "train.py")
    assert done.returncode == 1
    for rank in (0, 1):
        assert f"[{rank}] has 0.25 a" in done.stdout
    assert 'run.choose("rate") is' in done.stderr
    assert "was 0.001 to 1 before" in done.stderr
    assert 'lade=b: the script never called run.choose("lade", …). Did you mean' in done.stdout
    from farandole.report.history import read_history

    history = read_history(sandbox.folder / "runs/r/metrics.jsonl")
    assert history.choices == {"rate": 0.25, "late": "a"}


def test_a_value_beyond_the_bounds_or_given_twice_is_refused(sandbox: Any) -> None:
    sandbox.script(
        "train.py", 'import farandole as fd\nfd.init().choose("rate", 0.1, 1.0, log=True)'
    )
    beyond = sandbox.farandole("run", "--choose", "rate=2", "train.py")
    assert beyond.returncode == 1
    assert "--choose rate=2: give one of 0.1 to 1 (log)" in beyond.stderr
    twice = sandbox.farandole("run", "--choose", "a=1", "--choose", "a=2", "train.py")
    assert twice.returncode == 2
    assert "a is given twice, and was 1 before" in twice.stderr

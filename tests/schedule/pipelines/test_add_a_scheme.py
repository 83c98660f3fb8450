"""Adding a pipeline schedule: one function, registered, is checked, shown and run by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from farandole import Layout
from farandole.cli import commands
from farandole.errors import UserError
from farandole.layout import parse_layout
from farandole.schedule.pipelines import (
    SCHEMES,
    Action,
    Costs,
    Pipeline,
    Scheme,
    build,
    check,
    one_each,
    simulate,
    update,
)
from tests.layout.models import assert_same, plainly, task, trained_in_stages


def last_first(stages: int, micros: int) -> Pipeline:
    """GPipe whose backwards begin with the newest micro-batch.

    ```
    rank 0   F0 F1 F2          B2 B1 B0
    rank 1      F0 F1 F2    B2 B1 B0
    ```
    """
    forwards = [("F", micro) for micro in range(micros)]
    backwards = [("B", micro) for micro in reversed(range(micros))]
    actions = tuple(
        (*(Action(kind, rank, micro) for kind, micro in forwards + backwards), update(1))  # type: ignore[arg-type]
        for rank in range(stages)
    )
    return Pipeline("last-first", micros, (one_each(stages),), actions)


@pytest.fixture
def scheme() -> Iterator[str]:
    SCHEMES.register("last-first", Scheme(last_first))
    yield "last-first"
    SCHEMES.remove("last-first")


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micros", [1, 3, 8])
def test_it_is_proved_and_played(scheme: str, stages: int, micros: int) -> None:
    pipeline = build(scheme, stages, micros)
    check(pipeline)
    assert simulate(pipeline, Costs((1.0,) * stages, (2.0,) * stages)).seconds > 0


def test_the_command_line_shows_it(scheme: str) -> None:
    shown = CliRunner().invoke(commands, ["schedule", f"stages=2,microbatches=3,schedule={scheme}"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("last-first: 2 stage(s) on 2 rank(s), 3 micro-batch(es)\n")
    for command in ("schedule", "run"):
        help_text = " ".join(CliRunner().invoke(commands, [command, "-h"]).output.split())
        unwrapped = help_text.replace("- ", "-")  # lines are broken behind hyphens too
        assert "zero-bubble, last-first, gems" in unwrapped


def test_a_layout_runs_it(scheme: str, tmp_path: Path) -> None:
    """The interpreter trains as one process would."""
    layout = parse_layout(f"stages=2,microbatches=3,schedule={scheme}")
    assert layout == Layout(stages=2, microbatches=3, schedule="last-first")
    made = task("mlp")
    batches = made.batches([6, 3, 5])
    found = trained_in_stages(layout, made.model, batches, made.loss, tmp_path)
    assert_same(found, plainly(made.model, batches, made.loss))


def test_what_it_does_not_have_is_refused(scheme: str) -> None:
    with pytest.raises(UserError, match="last-first has one rank for each stage"):
        build(scheme, 2, 4, replicas=(1, 2))
    with pytest.raises(UserError, match="last-first has one direction"):
        build(scheme, 2, 4, pairs=1)


def test_it_is_unknown_before_and_after() -> None:
    with pytest.raises(UserError, match="schedule='last-first' is not a choice"):
        Layout(stages=2, schedule="last-first")

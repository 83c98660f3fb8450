"""Every synchronous schedule computes what one process computes: losses, gradients, weights.

Whatever the model, the cut, the micro-batches and the batches are; in double precision, to 1e-10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole import Layout
from farandole.layout import parse_layout
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import (
    TASKS,
    Outcome,
    Recorder,
    adamw,
    assert_same,
    plainly,
    sgd,
    task,
    tensors_of,
    trained_in_stages,
)


def even(micros: int, times: int = 2) -> int:
    return times * (1 + micros // times)


def layouts(kind: str) -> st.SearchStrategy[Layout]:
    """Layouts of one kind: up to four stages and about five micro-batches."""

    @st.composite
    def build(draw: st.DrawFn) -> Layout:
        stages, micros = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        options: dict[str, Any] = {"schedule": kind}
        if kind == "layer":
            micros = 1
        elif kind == "interleaved":
            ranks, chunks = draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 1), (1, 3)]))
            stages, options["chunks"] = ranks * chunks, chunks
        elif kind == "gems":
            micros = even(micros)
        elif kind == "bidirectional":
            pairs = draw(st.integers(1, 2))
            micros = even(micros, 2 * pairs)
            schedule = draw(st.sampled_from(["layer", "gpipe", "1f1b"]))
            options = {"schedule": schedule, "bidirectional": True, "pairs": pairs}
        elif kind == "replicas":
            stages = draw(st.integers(1, 3))
            counts = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
            schedule = draw(st.sampled_from(["gpipe", "1f1b"]))
            options = {"schedule": schedule, "replicas": tuple(min(2, n) for n in counts)}
        if kind != "zero-bubble":
            options["recompute"] = draw(st.booleans())
        reduction = draw(st.sampled_from(["mean", "mean", "sum"]))
        return Layout(stages=stages, microbatches=micros, reduction=reduction, **options)

    return build()


KINDS = (
    "layer",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "gems",
    "bidirectional",
    "replicas",
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=7, derandomize=True)
@given(data=st.data())
def test_three_steps_are_those_of_one_process(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Batches are of any size: not divisible, smaller than the micro-batches, never the same."""
    layout = data.draw(layouts(kind))
    made = task(data.draw(st.sampled_from(TASKS)))
    batches = made.batches(data.draw(st.lists(st.integers(1, 7), min_size=3, max_size=3)))
    make_optimizer = data.draw(st.sampled_from([sgd, adamw]))
    clip = data.draw(st.sampled_from([None, None, 0.3]))
    loss = made.loss_for(layout)
    expected = plainly(made.model, batches, loss, make_optimizer, clip)
    folder = tmp_path_factory.mktemp("runs")
    found = trained_in_stages(layout, made.model, batches, loss, folder, make_optimizer, clip=clip)
    assert_same(found, expected)


@pytest.mark.parametrize("name", TASKS)
def test_every_model_under_the_schedule_that_splits_the_backward(name: str, tmp_path: Path) -> None:
    """The cut through the graph of a stage is where most can go wrong."""
    made = task(name)
    batches = made.batches([5, 2, 6])
    layout = Layout(stages=3, microbatches=2, schedule="zero-bubble")
    found = trained_in_stages(layout, made.model, batches, made.loss, tmp_path)
    assert_same(found, plainly(made.model, batches, made.loss))


def test_a_batch_with_fewer_rows_than_a_stage_has_ranks(tmp_path: Path) -> None:
    """Some ranks then have nothing to compute, and still know the loss and take the step."""
    made = task("mlp")
    batches = made.batches([1, 4, 2])
    layout = Layout(stages=2, microbatches=3, replicas=(1, 3))
    found = trained_in_stages(layout, made.model, batches, made.loss, tmp_path)
    assert_same(found, plainly(made.model, batches, made.loss))


def test_a_model_that_is_no_sequence_is_cut_where_the_layout_says(tmp_path: Path) -> None:
    made = task("skipping")
    batches = made.batches([5, 3, 4])
    expected = plainly(made.model, batches, made.loss)
    layout = "stages=2,microbatches=2,schedule=interleaved,cuts=third"

    def body(run: Run) -> Outcome:
        trainer = run.trainer(made.model, made.loss, sgd, layout=layout)
        assert trainer.layout == parse_layout(f"{layout},balance=1+1")
        recorder = Recorder(made.model, trainer.optimizer)
        losses = [trainer.step(x, y).item() for x, y in batches]
        prediction = trainer.predict(batches[-1][0])
        return Outcome(losses, recorder.steps, tensors_of(made.model), prediction)

    assert_same(run_world(1, body, folder=tmp_path), expected)

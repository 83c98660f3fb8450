"""Faults put into right pipelines: the checker names the rank, the action and the position."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.schedule import ScheduleError
from farandole.schedule.pipelines import (
    Action,
    Pipeline,
    backward,
    build,
    check,
    forward,
    one_each,
    opposite,
    stream,
    update,
)

RIGHT = [
    build("layer", 2, 2),
    build("gpipe", 3, 3),
    build("1f1b", 3, 4),
    build("1f1b", 3, 5, replicas=(2, 1, 2)),
    build("interleaved", 4, 3),
    build("zero-bubble", 3, 4),
    build("gpipe", 3, 4, pairs=2),
    stream("pipedream", 3, 1).unroll(5),
    stream("pipedream", 2, 1, replicas=(2, 1)).unroll(5),
    stream("2bw", 2, 3).unroll(3),
]


def rewritten(pipeline: Pipeline, rank: int, *actions: Action) -> Pipeline:
    """With another list for one rank."""
    lists = list(pipeline.actions)
    lists[rank] = actions
    return replace(pipeline, actions=tuple(lists))


def problem(pipeline: Pipeline) -> str:
    with pytest.raises(ScheduleError) as error:
        check(pipeline)
    return str(error.value)


@st.composite
def places(draw: st.DrawFn) -> tuple[Pipeline, int, int]:
    """A right pipeline, and a position in the list of one of its ranks."""
    pipeline = draw(st.sampled_from(RIGHT))
    rank = draw(st.integers(0, pipeline.ranks - 1))
    return pipeline, rank, draw(st.integers(0, len(pipeline.actions[rank]) - 1))


@settings(max_examples=150)
@given(places())
def test_nothing_can_be_left_out(place: tuple[Pipeline, int, int]) -> None:
    pipeline, rank, at = place
    check(pipeline)
    actions = pipeline.actions[rank]
    problem(rewritten(pipeline, rank, *actions[:at], *actions[at + 1 :]))


@settings(max_examples=150)
@given(places())
def test_nothing_can_be_done_twice(place: tuple[Pipeline, int, int]) -> None:
    pipeline, rank, at = place
    actions = pipeline.actions[rank]
    said = problem(rewritten(pipeline, rank, *actions[: at + 1], *actions[at:]))
    assert f"{pipeline.name}, rank {rank}, position {at + 1}: " in said


@settings(max_examples=150)
@given(places(), st.sampled_from([-1, 1, 7]))
def test_no_version_can_be_another(place: tuple[Pipeline, int, int], other: int) -> None:
    pipeline, rank, at = place
    actions = list(pipeline.actions[rank])
    actions[at] = actions[at]._replace(version=actions[at].version + other)
    assert f"rank {rank}, position " in problem(rewritten(pipeline, rank, *actions))


@settings(max_examples=150)
@given(places(), st.sampled_from(["stage", "micro", "direction"]), st.integers(-2, 9))
def test_nothing_can_be_done_elsewhere(
    place: tuple[Pipeline, int, int], field: str, value: int
) -> None:
    pipeline, rank, at = place
    actions = list(pipeline.actions[rank])
    changed = actions[at]._replace(**{field: value})
    if actions[at].kind == "U" or changed == actions[at]:
        return
    actions[at] = changed
    problem(rewritten(pipeline, rank, *actions))


F0, F1, B0, B1, U = forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1), update(1)


def two_stages(first: tuple[Action, ...], last: tuple[Action, ...]) -> Pipeline:
    moved = tuple(a if a.kind == "U" else a._replace(stage=1) for a in last)
    return Pipeline("mine", 2, (one_each(2),), (first, moved))


def test_ranks_that_wait_for_each_other() -> None:
    said = problem(two_stages((F0, B0, F1, B1, U), (F0, F1, B0, B1, U)))
    assert said == (
        "mine: these ranks wait for ever: "
        "rank 0 waits before B0 of stage 0 (position 1) for the gradient of micro-batch 0 from "
        "stage 1 (rank 1); "
        "rank 1 waits before F1 of stage 1 (position 1) for the forward of micro-batch 1 from "
        "stage 0 (rank 0)."
    )


def test_an_update_that_nobody_meets() -> None:
    both = (((0, 1),),)
    lonely = Pipeline("mine", 2, both, ((F0, B0, U, update(2)), (F1, B1, U)))
    assert "rank 0 waits before the update to version 2 (position 3) for rank 1 to come" in (
        problem(lonely)
    )
    check(Pipeline("mine", 2, both, ((F0, B0, U), (F1, B1, U))))


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ((B0, F0, F1, B1, U), "rank 0, position 0: B0 of stage 0 comes first, but should follow F"),
        ((F0, F1, B0, U), "position 4: F1 of stage 0 has no backward before the end of the list"),
        (
            (F0, B0, F0, B0, U),
            "position 2: F0 of stage 0 comes after B0, but should follow nothing",
        ),
        ((F0, B0, U), "rank 0: F1 of stage 0 is missing"),
        ((F0, B0, U, F1, B1), "rank 0, position 5: has gradients that no update uses"),
        ((F0, B0, F1, B1, update(2)), "position 4: the update to version 2 follows version 0"),
        (
            (F0, B0, F1._replace(version=1), B1, U),
            "position 2: F1 of stage 0 uses version 1; so far there is 0",
        ),
        (
            (F0, F1, B0, U, B1._replace(version=1), update(2)),
            "position 4: B1 of stage 0 uses version 1, but F1 used 0",
        ),
        (
            (F0, B0, F1, B1._replace(kind="W"), U),
            "W1 of stage 0 comes after F1, but should follow I",
        ),
        ((F0, B0, F1._replace(stage=1), B1, U), "names stage 1, outside 0 … 0"),
        ((F0, B0, F1._replace(micro=2), B1, U), "names micro-batch 2, outside 0 … 1"),
    ],
)
def test_what_is_said(actions: tuple[Action, ...], said: str) -> None:
    assert said in problem(Pipeline("mine", 2, (one_each(1),), (actions,)))


def test_the_newest_version_is_allowed_when_asked_for() -> None:
    stale = Pipeline(
        "mine", 2, (one_each(1),), ((F0, F1, B0, U, B1._replace(version=1), update(2)),)
    )
    check(stale, same_version=False)


def test_a_micro_batch_has_one_replica() -> None:
    """Micro-batch 0 in both directions: twice in the gradient."""
    f, b = forward(0, 0, 1), backward(0, 0, 1)
    said = problem(Pipeline("mine", 1, opposite(1), ((F0, B0, f, b, U),)))
    assert "micro-batch 0 is computed in direction" in said


def test_a_rank_has_its_own_stage() -> None:
    swapped = Pipeline("mine", 1, (((1,), (0,)),), build("gpipe", 2, 1).actions)
    assert "rank 0, position 0: F0 of stage 0 belongs on rank 1" in problem(swapped)

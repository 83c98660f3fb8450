"""Every scheme is right for every size: proved by the checker, none left to chance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from farandole.errors import UserError
from farandole.schedule.pipelines import (
    SCHEMES,
    Pipeline,
    backward,
    build,
    check,
    forward,
    opposite,
    stream,
    update,
)

STAGES, MICROS = range(1, 17), range(1, 33)


def sums_up_to(total: int, stages: int) -> list[tuple[int, ...]]:
    """All rows of `stages` positive numbers whose sum is at most `total`."""
    if stages == 0:
        return [()]
    return [
        (*counts, last)
        for counts in sums_up_to(total - 1, stages - 1)
        for last in range(1, total - sum(counts) + 1)
    ]


REPLICAS = [counts for stages in range(1, 9) for counts in sums_up_to(8, stages)]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "interleaved"])
def test_every_size(name: str) -> None:
    for stages, micros in product(STAGES, MICROS):
        pipeline = build(name, stages, micros)
        assert (pipeline.stages, pipeline.ranks, pipeline.micros) == (stages, stages, micros)
        assert_one_step(pipeline)
        check(pipeline)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_every_size_of_interleaved(chunks: int) -> None:
    for ranks, micros in product(range(1, 16 // max(2, chunks) + 1), MICROS):
        pipeline = build("interleaved", ranks * chunks, micros, chunks=chunks)
        assert pipeline.ranks == ranks
        assert pipeline.held(0) == tuple(range(0, ranks * chunks, ranks))
        assert_one_step(pipeline)
        check(pipeline)


@pytest.mark.parametrize("name", ["layer", "gpipe", "1f1b"])
def test_two_directions(name: str) -> None:
    for stages, micros in product((1, 2, 3, 4, 7, 8, 16), (1, 2, 3, 4, 8, 15, 32)):
        for pairs in {1, 2, 5, micros // 2 or 1}:
            pipeline = build(name, stages, micros, pairs=pairs)
            assert pipeline.name == f"gems of {name}"
            assert pipeline.homes == opposite(stages)
            assert_one_step(pipeline)
            check(pipeline)


def test_every_choice_of_replicas() -> None:
    for counts in REPLICAS:
        for micros in (1, 2, 5, 13):
            for name in ("gpipe", "1f1b"):
                pipeline = build(name, len(counts), micros, replicas=counts)
                assert pipeline.ranks == sum(counts)
                check(pipeline)
        endless = stream("pipedream", len(counts), 1, replicas=counts)
        for n in (1, 3, 12):
            check(endless.unroll(n))


def assert_one_step(pipeline: Pipeline) -> None:
    """All weights are those of the start, and the one update is the last that a rank does."""
    for actions in pipeline.actions:
        assert actions[-1] == update(1)
        assert {action.version for action in actions[:-1]} <= {0}


def streams_of(stages: int) -> Iterator[tuple[str, int, dict[str, bool]]]:
    yield "pipedream", 1, {}
    yield "pipedream", 1, {"vertical": True}
    yield "pipedream", 1, {"stash": False}
    yield "2bw", stages, {}
    yield "2bw", stages + 3, {}


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 12])
def test_streams_of_any_length(stages: int) -> None:
    for name, micros, options in streams_of(stages):
        endless = stream(name, stages, micros, **options)
        for n in (1, 2, stages, stages + 3):
            check(endless.unroll(n), same_version=options.get("stash", True))


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_no_turn_knows_how_many_will_follow(stages: int) -> None:
    for name, micros, options in streams_of(stages):
        endless = stream(name, stages, micros, **options)
        for rank in range(stages):
            turns = [endless.turn(rank, k) for k in range(9)]
            for n in range(1, 9):
                expected = (*(a for turn in turns[:n] for a in turn), *endless.drain(rank, n))
                assert endless.unroll(n).actions[rank] == expected
            assert endless.drain(rank, 0) == ()


def test_pipedream_by_hand() -> None:
    endless = stream("pipedream", 3, 1)
    assert endless.turn(0, 1) == (forward(0, 1),)
    assert endless.turn(0, 4) == (forward(0, 4, version=2), backward(0, 2), update(3))
    assert endless.drain(1, 3) == (backward(1, 2, version=1), update(3))
    newest = stream("pipedream", 3, 1, stash=False)
    assert newest.turn(0, 4) == (forward(0, 4, version=2), backward(0, 2, version=2), update(3))
    vertical = stream("pipedream", 3, 1, vertical=True)
    assert vertical.turn(2, 4) == (
        forward(2, 4, version=2),
        backward(2, 4, version=2),
        update(5),
    )


def test_pipedream_with_replicas_by_hand() -> None:
    """Stage 0 on ranks 0 and 1: a round is two minibatches and one update, on both."""
    endless = stream("pipedream", 3, 1, replicas=(2, 1, 1))
    assert [endless.turn(0, k) for k in range(3)] == [
        (forward(0, 0),),
        (),
        (forward(0, 2), backward(0, 0), update(1)),
    ]
    assert endless.turn(1, 3) == (forward(0, 3), backward(0, 1), update(1))
    assert endless.turn(1, 5) == (forward(0, 5, version=1), backward(0, 3), update(2))
    assert endless.drain(0, 3) == (backward(0, 2), update(2))
    assert endless.drain(1, 3) == (backward(0, 1), update(1), update(2)), "round 1 lacks its own"


def test_two_versions_by_hand() -> None:
    endless = stream("2bw", 2, 2)
    assert endless.turn(0, 0) == (forward(0, 0), forward(0, 1), backward(0, 0))
    assert endless.turn(0, 2) == (
        forward(0, 4, version=1),
        backward(0, 3),
        update(2),
        forward(0, 5, version=1),
        backward(0, 4, version=1),
    )
    assert endless.drain(0, 3) == (backward(0, 5, version=1), update(3))


def test_gems_takes_turns() -> None:
    last = build("1f1b", 2, 4, pairs=1).actions[1]
    down = (forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1))
    up = (forward(0, 2, 1), forward(0, 3, 1), backward(0, 2, 1), backward(0, 3, 1))
    assert last == (*down, *up, update(1))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f2b", 2, 2), {}, "no pipeline schedule '1f2b'. Did you mean '1f1b'?"),
        (("pipedream", 2, 1), {}, "see stream()"),
        (("gpipe", 0, 2), {}, "gpipe: 0 stages; give at least 1."),
        (("gpipe", 2, 0), {}, "gpipe: 0 micro-batches; give at least 1."),
        (("interleaved", 3, 2), {}, "2 stages on each rank do not divide 3 stages"),
        (("interleaved", 3, 2), {"chunks": 0}, "0 stages on each rank"),
        (("1f1b", 3, 2), {"replicas": (2, 1)}, "replicas 2+1: give one number, at least 1, for"),
        (("1f1b", 2, 2), {"replicas": (2, 0)}, "replicas 2+0: give one number, at least 1, for"),
        (("zero-bubble", 2, 2), {"replicas": (2, 1)}, "replicas go with gpipe, 1f1b"),
        (("1f1b", 2, 2), {"replicas": (2, 1), "pairs": 1}, "1f1b in two directions has one rank"),
        (("zero-bubble", 2, 2), {"pairs": 1}, "pairs go with layer, gpipe, 1f1b"),
        (("1f1b", 2, 2), {"pairs": -1}, "-1 pairs; give 0 for one direction"),
    ],
)
def test_what_cannot_be_built(
    arguments: tuple[str, int, int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as error:
        build(*arguments, **options)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("pipedreem", 2, 1), {}, "no endless schedule 'pipedreem'. Did you mean 'pipedream'?"),
        (("gpipe", 2, 1), {}, "see build()"),
        (("pipedream", 0, 1), {}, "0 stages"),
        (("pipedream", 2, 2), {}, "pipedream: 2 micro-batches; a step is one whole minibatch."),
        (("pipedream", 2, 1), {"vertical": True, "replicas": (2, 1)}, "without replicas"),
        (("pipedream", 2, 1), {"vertical": True, "stash": False}, "cannot go without stash"),
        (("2bw", 4, 3), {}, "3 micro-batches for 4 stages need more than two versions"),
        (("2bw", 2, 2), {"replicas": (2, 1)}, "they are for pipedream"),
    ],
)
def test_what_cannot_be_streamed(
    arguments: tuple[str, int, int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as error:
        stream(*arguments, **options)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_a_stream_has_steps_and_ranks() -> None:
    endless = stream("pipedream", 2, 1)
    with pytest.raises(UserError, match="0 steps"):
        endless.unroll(0)
    with pytest.raises(UserError, match="rank 2 is not among 0 … 1"):
        endless.turn(2, 0)

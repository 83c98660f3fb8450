"""What ranks hold and how long they wait, against what the papers say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.schedule.pipelines import (
    Costs,
    Pipeline,
    PipelineTimeline,
    backward,
    build,
    facts,
    forward,
    one_each,
    peak_bytes,
    simulate,
    stream,
    update,
)

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 16)))


def played(pipeline: Pipeline) -> PipelineTimeline:
    """A backward costs two forwards."""
    return simulate(pipeline, Costs.even(pipeline.stages, 1.0, 2.0))


# Memory


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations(p: int, m: int) -> None:
    assert facts(build("layer", p, m)).activations == (1,) * p
    assert facts(build("gpipe", p, m)).activations == (m,) * p
    assert facts(build("1f1b", p, m)).activations == tuple(min(m, p - r) for r in range(p))
    assert max(facts(build("zero-bubble", p, m)).activations) == min(m, p)
    assert facts(build("layer", p, 2 * m, pairs=m)).activations == (1,) * p
    assert max(facts(build("gpipe", p, 2 * m, pairs=1)).activations) == m


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_versions(p: int) -> None:
    assert facts(build("1f1b", p, 4)).versions == (1,) * p
    n = 3 * p + 2
    pipeline = stream("pipedream", p, 1).unroll(n)
    assert facts(pipeline).versions == tuple(p - s for s in range(p))
    assert facts(pipeline).activations == tuple(p - s for s in range(p))
    assert facts(stream("pipedream", p, 1, stash=False).unroll(n)).versions == (1,) * p
    # The last stage has the newest weights long before it may use them.
    assert facts(stream("pipedream", p, 1, vertical=True).unroll(n)).versions == (p,) * p
    for m in (p, p + 1, 2 * p):
        assert max(facts(stream("2bw", p, m).unroll(5)).versions) == 2


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_version_of_a_forward(p: int) -> None:
    pipeline = stream("pipedream", p, 1).unroll(20)
    vertical = stream("pipedream", p, 1, vertical=True).unroll(20)
    for stage in range(p):
        for rank_actions, depth in ((pipeline, p - 1 - stage), (vertical, p - 1)):
            forwards = [a for a in rank_actions.actions[stage] if a.kind == "F"]
            assert [a.version for a in forwards] == [max(0, i - depth) for i in range(20)]


def test_peak_bytes() -> None:
    assert peak_bytes(build("1f1b", 3, 8), [10, 20, 30], [1, 2, 3]) == [31, 42, 33]
    assert peak_bytes(build("gpipe", 2, 4), [10, 20], [1, 2]) == [41, 82]
    # Both directions: the weights of two stages, the activations of one at a time.
    assert peak_bytes(build("layer", 2, 2, pairs=1), [10, 20], [1, 2]) == [23, 23]
    # Two stages on a rank.
    pipeline = build("interleaved", 2, 1)
    assert peak_bytes(pipeline, [10, 20], [1, 2]) == [33]
    assert peak_bytes(stream("pipedream", 3, 1).unroll(9), [10, 20, 30], [1, 2, 3]) == [33, 44, 33]


def test_the_peak_of_a_sum_is_not_the_sum_of_peaks() -> None:
    """Two activations with one version, then one activation with two."""
    first = (forward(0, 0), forward(0, 1), backward(0, 1), update(1))
    then = (backward(0, 0), update(2))
    pipeline = Pipeline("mine", 2, (one_each(1),), ((*first, *then),))
    assert facts(pipeline).activations == (2,)
    assert facts(pipeline).versions == (2,)
    assert peak_bytes(pipeline, [10], [1]) == [21]
    assert peak_bytes(pipeline, [1], [10]) == [21]


def test_bytes_are_given_for_every_stage() -> None:
    with pytest.raises(UserError, match="weight_bytes: 1 numbers for 2 stages"):
        peak_bytes(build("gpipe", 2, 1), [1, 1], [1])


# Time


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles(p: int, m: int) -> None:
    assert played(build("layer", p, m)).seconds == 3 * p * m
    for name in ("gpipe", "1f1b"):
        timeline = played(build(name, p, m))
        assert timeline.seconds == 3 * (m + p - 1)
        assert timeline.idle_share == pytest.approx((p - 1) / (m + p - 1))
    if p > 1:
        assert played(build("zero-bubble", p, m)).idle_share < timeline.idle_share
    if m >= p:
        assert played(build("zero-bubble", p, m)).seconds == 3 * m + p - 1
    for v in (2, 3):
        # v stages on each rank, each 1/v as long.
        interleaved = played(build("interleaved", v * p, m, chunks=v))
        if m % p == 0:
            assert interleaved.seconds == 3 * (v * m + p - 1)
        if m > 1 < p:
            assert interleaved.idle_share < timeline.idle_share
        else:
            assert interleaved.idle_share == pytest.approx(timeline.idle_share)


@pytest.mark.parametrize(("p", "k"), list(product((1, 2, 3, 4, 8), (1, 2, 4))))
def test_gems(p: int, k: int) -> None:
    """MAST, and MASTER with k pairs: the gain goes to 3p/(2p+1)."""
    assert played(build("layer", p, 2 * k, pairs=k)).seconds == 3 * p + (2 * k - 1) * (2 * p + 1)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_without_a_flush_a_step_costs_what_its_work_costs(p: int) -> None:
    for endless, work in ((stream("pipedream", p, 1), 3), (stream("2bw", p, p), 3 * p)):
        short, long = (played(endless.unroll(n)).seconds for n in (10, 11))
        assert long - short == work


def test_two_ranks_for_a_slow_stage_keep_up() -> None:
    costs = Costs((2.0, 1.0, 1.0), (4.0, 2.0, 2.0))
    alone = simulate(build("1f1b", 3, 40), costs)
    shared = simulate(build("1f1b", 3, 40, replicas=(2, 1, 1)), costs)
    assert alone.seconds > 6 * 40
    assert shared.seconds < 3 * 40 + 3 * 8


def test_transfers_and_updates_take_their_time() -> None:
    costs = Costs((1.0, 1.0), (2.0, 2.0), transfer_seconds=10.0, update_seconds=100.0)
    timeline = simulate(build("gpipe", 2, 1), costs)
    times = [(s.rank, str(s.action), s.begin, s.end) for s in timeline.spans]
    assert times == [
        (0, "F0", 0.0, 1.0),
        (0, "B0", 24.0, 26.0),
        (0, "U", 26.0, 126.0),
        (1, "F0", 11.0, 12.0),
        (1, "B0", 12.0, 14.0),
        (1, "U", 14.0, 114.0),
    ]
    assert timeline.seconds == 126.0
    assert timeline.busy_seconds == (3.0, 3.0)
    assert timeline.idle_share == 1 - 6 / 252
    # Both stages of a rank: nothing travels.
    assert simulate(build("interleaved", 2, 1), costs).seconds == 106.0


def test_an_update_waits_for_all_that_hold_the_stage() -> None:
    timeline = simulate(build("layer", 2, 2, pairs=1), Costs((1.0, 1.0), (2.0, 2.0)))
    updates = {span.rank: span.begin for span in timeline.spans if span.action.kind == "U"}
    assert updates == {0: timeline.seconds, 1: timeline.seconds}


PIPELINES = st.sampled_from(
    [
        build("1f1b", 3, 5),
        build("1f1b", 3, 7, replicas=(1, 3, 1)),
        build("interleaved", 6, 5),
        build("zero-bubble", 4, 6),
        build("1f1b", 3, 5, pairs=2),
        stream("pipedream", 3, 1, replicas=(1, 2, 2)).unroll(7),
        stream("2bw", 3, 4).unroll(3),
    ]
)
SECONDS = st.floats(0, 9)


@settings(max_examples=60)
@given(PIPELINES, st.data())
def test_nothing_begins_too_early(pipeline: Pipeline, data: st.DataObject) -> None:
    """Neither before the rank is free nor before what it needs has come."""
    by_stage = st.lists(SECONDS, min_size=pipeline.stages, max_size=pipeline.stages)
    costs = Costs(data.draw(by_stage), data.draw(by_stage), data.draw(st.floats(0, 1)), 0.5, 0.25)
    spans = simulate(pipeline, costs).spans
    free = [0.0] * pipeline.ranks
    for span in spans:
        assert span.begin >= free[span.rank]
        free[span.rank] = span.end
    ends = {(s.action.kind, *s.action[1:4]): (s.end, s.rank) for s in spans}
    for span in spans:
        kind, stage, micro, direction, _ = span.action
        before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind)
        if before in range(pipeline.stages):
            end, rank = ends[kind, before, micro, direction]
            assert span.begin >= end + (0.5 if rank != span.rank else 0.0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (lambda: Costs((1.0, -1.0), (1.0, 1.0)), "a cost of -1 seconds"),
        (lambda: Costs((1.0,), (1.0,), input_share=2.0), "input_share=2 is no share"),
        (lambda: simulate(build("gpipe", 2, 1), Costs((1.0,), (1.0, 1.0))), "1 numbers for 2"),
    ],
)
def test_costs_that_cannot_be(costs: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        costs()

"""The cost read off a schedule is the closed form of its algorithm."""

from __future__ import annotations

import dataclasses
import math

import pytest

from farandole.errors import UserError
from farandole.schedule import (
    Link,
    Round,
    Schedule,
    Transfer,
    cost_seconds,
    double_tree,
    halving_doubling,
    naive,
    parameter_server,
    ring,
    torus,
    two_level,
)
from farandole.topology import Topology

A, B = 3e-6, 2e-9
LINK = Link(seconds_per_message=A, seconds_per_byte=B)
SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 63, 64]


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("per_rank", [0, 1, 1000])
def test_closed_forms(p: int, per_rank: int) -> None:
    n = p * per_rank
    seconds = {
        build.__name__: cost_seconds(build(p), n, LINK) for build in (naive, parameter_server, ring)
    }
    assert seconds["naive"] == pytest.approx(2 * (p - 1) * (A + n * B))
    each_its_share = 2 * (p - 1) * A + 2 * (p - 1) / p * n * B
    assert seconds["parameter_server"] == pytest.approx(each_its_share)
    assert seconds["ring"] == pytest.approx(each_its_share)


@pytest.mark.parametrize("p", SIZES)
def test_closed_form_of_halving_doubling(p: int) -> None:
    levels = p.bit_length() - 1
    core = 2**levels
    n = core * 1000
    expected = 2 * levels * A + 2 * (core - 1) / core * n * B
    if p != core:
        expected += 2 * (A + n * B)
    assert cost_seconds(halving_doubling(p), n, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("p", [7, 8, 15, 16, 31, 40, 63, 64])
@pytest.mark.parametrize("segments", [1, 2, 8, 50])
def test_form_of_the_double_tree(p: int, segments: int) -> None:
    """4(D + S − 1) messages of n/2S bytes; a few less, where the trees are not quite full."""
    n = 2 * segments * 1000
    bound = 4 * (p.bit_length() - 1 + segments - 1)
    per_message = A + n / (2 * segments) * B
    messages = cost_seconds(double_tree(p, segments), n, LINK) / per_message
    assert bound - 4 < messages <= bound + 1e-9


def test_a_long_pipeline_in_the_double_tree_costs_twice_the_vector() -> None:
    segments = 400
    n = 2 * segments * 1000
    seconds = cost_seconds(double_tree(16, segments), n, Link(0.0, B))
    assert seconds == pytest.approx(2 * n * B, rel=0.01)


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (1, 5), (4, 4), (3, 7), (8, 2)])
def test_closed_form_of_the_torus(columns: int, rows: int) -> None:
    p = columns * rows
    n = p * 1000
    expected = (2 * (columns - 1) + 2 * (rows - 1)) * A + 2 * (p - 1) / p * n * B
    assert cost_seconds(torus(columns, rows), n, LINK) == pytest.approx(expected)


def test_short_vectors_go_to_halving_long_ones_to_the_ring_and_between_is_the_tree() -> None:
    """When p is no power of two; when it is, halving-doubling is never worse than the others."""
    schedules = {
        "halving_doubling": halving_doubling(200),
        "double_tree": double_tree(200, segments=32),
        "ring": ring(200),
    }

    def best(messages_worth: float) -> str:
        """The fastest on a vector whose bytes take as long as so many empty messages."""
        n = round(messages_worth * A / B)
        return min(schedules, key=lambda name: cost_seconds(schedules[name], n, LINK))

    assert [best(worth) for worth in (1, 300, 10_000)] == list(schedules)


def test_halving_doubling_beats_the_ring_by_its_rounds_alone() -> None:
    n = 64 * 1000
    gap = cost_seconds(ring(64), n, LINK) - cost_seconds(halving_doubling(64), n, LINK)
    assert gap == pytest.approx((2 * 63 - 2 * 6) * A)


INSIDE, ACROSS = Link(1e-6, 1e-10), Link(5e-5, 8e-9)


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (4, 1), (2, 2), (3, 4), (5, 3)])
def test_closed_form_of_two_levels(hosts: int, per_host: int) -> None:
    p = hosts * per_host
    n = p * 1000
    topology = Topology.from_names([f"host{rank % hosts}" for rank in range(p)])
    expected = (
        2 * (per_host - 1) * INSIDE.seconds_per_message
        + 2 * (per_host - 1) / per_host * n * INSIDE.seconds_per_byte
        + 2 * (hosts - 1) * ACROSS.seconds_per_message
        + 2 * (hosts - 1) / hosts * n * ACROSS.seconds_per_byte
    )
    seconds = cost_seconds(two_level(topology), n, INSIDE, across=ACROSS, topology=topology)
    assert seconds == pytest.approx(expected)


def test_two_hosts_of_two_ranks_at_one_gigabit_per_second() -> None:
    """64 MiB cross each host's link once in each direction: 537 ms."""
    topology = Topology.from_names(["a", "a", "b", "b"])
    gigabit = Link(0.0, 8 / 1e9)
    seconds = {
        schedule.name: cost_seconds(
            schedule, 64 << 20, Link(0.0, 0.0), across=gigabit, topology=topology
        )
        for schedule in (two_level(topology), ring(4), halving_doubling(4))
    }
    assert seconds["two_level"] == pytest.approx(0.537, abs=0.0005)
    # In a ring one rank of each host sends across, and in total 1.5 times the vector.
    assert seconds["ring"] == pytest.approx(1.5 * seconds["two_level"])
    assert seconds["halving_doubling"] > seconds["ring"]


def seconds_of_a_round(topology: Topology, transfers: list[Transfer]) -> float:
    """Each transfer carries 1,000 bytes."""
    schedule = Schedule("mine", topology.size, 4, (Round.from_transfers(transfers),))
    return cost_seconds(schedule, 4000, INSIDE, across=ACROSS, topology=topology)


def test_the_link_of_a_host_is_shared_by_those_who_use_it() -> None:
    topology = Topology.from_names(["a", "a", "a", "b", "c"])
    message, thousand_bytes = 5e-5, 1000 * 8e-9
    out, out_too = Transfer(0, 3, 0, 1, "add"), Transfer(1, 4, 1, 2, "add")
    alone = seconds_of_a_round(topology, [out])
    assert alone == pytest.approx(message + thousand_bytes)
    both = seconds_of_a_round(topology, [out, out_too])
    assert both == pytest.approx(message + 2 * thousand_bytes), "messages overlap, bytes do not"
    in_and_out = seconds_of_a_round(topology, [out, Transfer(4, 1, 1, 2, "add")])
    assert in_and_out == pytest.approx(alone), "the two directions do not share"
    same_receiver = seconds_of_a_round(topology, [out, Transfer(4, 3, 1, 2, "add")])
    assert same_receiver == pytest.approx(2 * alone)


def test_a_rank_that_stays_in_its_host_does_not_wait_for_the_link() -> None:
    topology = Topology.from_names(["a", "a", "a", "b"])
    slow_inside = Link(1.0, 0.0)
    transfers = [Transfer(0, 3, 0, 1, "add"), Transfer(1, 2, 1, 2, "add")]
    schedule = Schedule("mine", 4, 4, (Round.from_transfers(transfers),))
    seconds = cost_seconds(schedule, 4000, slow_inside, across=Link(0.0, 5e-4), topology=topology)
    assert seconds == pytest.approx(1.0), "half a second on the link goes on beside it"


def test_equal_links_with_a_rank_per_host_cost_as_much_as_no_topology() -> None:
    topology = Topology.from_names([f"host{rank}" for rank in range(12)])
    for schedule in (naive(12), parameter_server(12), halving_doubling(12), double_tree(12)):
        flat = cost_seconds(schedule, 12_345, LINK)
        tiered = cost_seconds(schedule, 12_345, INSIDE, across=LINK, topology=topology)
        assert math.isclose(flat, tiered)


def test_half_a_description_of_the_hosts_is_refused() -> None:
    with pytest.raises(UserError, match="both `across` and `topology`"):
        cost_seconds(ring(2), 8, LINK, across=LINK)
    with pytest.raises(UserError, match="ring is for 2 ranks, the topology holds 3"):
        cost_seconds(ring(2), 8, LINK, across=LINK, topology=Topology.single(3))


def test_a_link_is_a_value() -> None:
    assert Link(1.0, 2.0) == Link(1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LINK.seconds_per_byte = 0.0  # type: ignore[misc]

"""Every algorithm, for 1 to 64 ranks and vectors of any length, proved and carried out."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.schedule import (
    ALGORITHMS,
    Schedule,
    build,
    check,
    double_tree,
    halving_doubling,
    most_square,
    naive,
    piece,
    piece_bounds,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    torus,
    two_level,
)
from farandole.topology import Topology

Vector = npt.NDArray[Any]
EVERY_SIZE = range(1, 65)


def carry_out(schedule: Schedule, vectors: list[Vector]) -> list[Vector]:
    """What each rank holds at the end, when each follows its own view of the schedule.

    The messages between two ranks arrive in the order in which they were sent.
    """
    views = [schedule.for_rank(rank) for rank in range(schedule.ranks)]
    held = [vector.copy() for vector in vectors]
    bounds = piece_bounds(schedule.chunks, len(vectors[0]))
    for index in range(len(schedule.rounds)):
        post: defaultdict[tuple[int, int], deque[Vector]] = defaultdict(deque)
        for rank, view in enumerate(views):
            for peer, first, stop, _ in view[index].sends:
                post[rank, peer].append(held[rank][bounds[first] : bounds[stop]].copy())
        for rank, view in enumerate(views):
            for peer, first, stop, op in view[index].receives:
                place = held[rank][bounds[first] : bounds[stop]]
                arrived = post[peer, rank].popleft()
                place[:] = place + arrived if op == "add" else arrived
        assert not any(post.values()), "a message that nobody receives"
    return held


@st.composite
def topologies(draw: st.DrawFn, max_ranks: int = 14) -> Topology:
    """Ranks strewn over hosts: uneven, and neighbours need not sit together."""
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=max_ranks))
    return Topology.from_names(names)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_right_for_1_to_64_ranks(name: str) -> None:
    for ranks in EVERY_SIZE:
        hosts_of_five = Topology.from_names([f"host{rank // 5}" for rank in range(ranks)])
        schedule = build(name, ranks, hosts_of_five)
        assert (schedule.name, schedule.ranks) == (name, ranks)
        assert schedule.collective == "all_reduce"
        check(schedule)


@pytest.mark.parametrize("half", [ring_reduce_scatter, ring_all_gather])
def test_the_halves_of_the_ring_are_right_for_1_to_64_ranks(half: Any) -> None:
    for ranks in EVERY_SIZE:
        check(half(ranks))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), topologies(), st.integers(0, 40), st.randoms())
def test_following_the_views_of_the_ranks_gives_the_sum(
    name: str, topology: Topology, length: int, random: Any
) -> None:
    schedule = build(name, topology.size, topology)
    generator = np.random.default_rng(random.getrandbits(32))
    vectors = [generator.normal(size=length).astype(np.float32) for _ in range(topology.size)]
    results = carry_out(schedule, vectors)
    np.testing.assert_allclose(results[0], np.sum(vectors, axis=0), rtol=1e-4, atol=1e-5)
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes(), "all ranks get the same bits"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 30))
def test_the_halves_of_the_ring_leave_each_rank_its_chunks(ranks: int, length: int) -> None:
    vectors = [np.arange(length) + 100 * rank for rank in range(ranks)]
    scattered = carry_out(ring_reduce_scatter(ranks), vectors)
    gathered = carry_out(ring_all_gather(ranks), vectors)
    for rank in range(ranks):
        mine = piece(rank, ranks, length)
        own = slice(mine.start, mine.stop)
        np.testing.assert_array_equal(scattered[rank][own], np.sum(vectors, axis=0)[own])
        for everyone in gathered:
            np.testing.assert_array_equal(everyone[own], vectors[rank][own])


@settings(max_examples=60, deadline=None)
@given(topologies(max_ranks=20), st.sampled_from([ring, halving_doubling, double_tree, naive]))
def test_two_level_takes_any_hosts_and_any_algorithm_between_them(
    topology: Topology, across: Any
) -> None:
    schedule = two_level(topology, across=across)
    check(schedule)
    again = two_level([host.ranks for host in topology.hosts], across=across)
    assert again.draw() == schedule.draw()


def test_two_level_gives_the_ranks_of_a_smaller_host_several_pieces() -> None:
    schedule = two_level([(0, 1, 2, 3), (4, 5, 6)])
    # Four pieces of two chunks; rank 6 has charge of the last two pieces of its host.
    between = [transfer for turn in schedule.rounds for transfer in turn if transfer.src == 6]
    partners = {transfer.dst for transfer in between}
    assert schedule.chunks == 8
    assert partners == {4, 2, 3}


def test_two_level_keeps_most_transfers_in_the_host() -> None:
    topology = Topology.from_names(["a", "b", "a", "b", "a", "b"])
    for turn in two_level(topology).rounds:
        for transfer in turn:
            same_host = topology.host_index(transfer.src) == topology.host_index(transfer.dst)
            same_index = topology.local_rank(transfer.src) == topology.local_rank(transfer.dst)
            assert same_host != same_index


@pytest.mark.parametrize("columns", range(1, 7))
@pytest.mark.parametrize("rows", range(1, 7))
def test_torus_stays_on_the_lines_of_the_grid(columns: int, rows: int) -> None:
    schedule = torus(columns, rows)
    check(schedule)
    assert len(schedule.rounds) == 2 * (columns - 1) + 2 * (rows - 1)
    for turn in schedule.rounds:
        for transfer in turn:
            row, column = divmod(transfer.src, columns)
            right = row * columns + (column + 1) % columns
            down = (row + 1) % rows * columns + column
            assert transfer.dst in (right, down)


def test_most_square_grid() -> None:
    assert [most_square(ranks) for ranks in (1, 7, 12, 36, 50)] == [
        (1, 1),
        (1, 7),
        (3, 4),
        (6, 6),
        (5, 10),
    ]
    assert build("torus", 7).draw().splitlines()[1:] == ring(7).draw().splitlines()[1:]


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_double_tree_has_no_inner_node_twice(segments: int) -> None:
    for ranks in range(2, 65):
        schedule = double_tree(ranks, segments)
        check(schedule)
        parents: list[set[tuple[int, int]]] = [set(), set()]
        for turn in schedule.rounds:
            for transfer in turn:
                if transfer.op == "add":
                    tree = transfer.first // segments
                    parents[tree].add((transfer.src, transfer.dst))
        inner = [{above for _, above in tree} for tree in parents]
        assert not inner[0] & inner[1]
        for tree in parents:
            children = [child for child, _ in tree]
            assert len(children) == len(set(children)) == ranks - 1
            above = [parent for _, parent in tree]
            assert max(above.count(parent) for parent in above) <= 2
        height = ranks.bit_length() - 1
        assert len(schedule.rounds) == 2 * height + segments - 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_has_nothing_to_do(name: str) -> None:
    assert build(name, 1).rounds == ()
    assert build(name, 1).for_rank(0) == []


@pytest.mark.parametrize(("ranks", "root"), [(2, 0), (2, 1), (7, 3)])
def test_naive_takes_any_root(ranks: int, root: int) -> None:
    schedule = naive(ranks, root)
    check(schedule)
    gather, spread = schedule.rounds
    assert {transfer.dst for transfer in gather} == {root}
    assert {transfer.src for transfer in spread} == {root}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 50))
def test_pieces_cover_the_vector_in_order(pieces: int, length: int) -> None:
    covered = [at for index in range(pieces) for at in piece(index, pieces, length)]
    sizes = [len(piece(index, pieces, length)) for index in range(pieces)]
    assert covered == list(range(length))
    assert max(sizes) - min(sizes) <= 1
    bounds = piece_bounds(pieces, length)
    assert np.diff(bounds).tolist() == sizes
    assert bounds[0] == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ring(0), "ring: 0 ranks; give at least 1"),
        (lambda: naive(0), "naive: 0 ranks"),
        (lambda: naive(3, root=3), "the root 3 is not among 3 ranks"),
        (lambda: halving_doubling(-1), "halving_doubling: -1 ranks"),
        (lambda: double_tree(0), "double_tree: 0 ranks"),
        (lambda: double_tree(4, segments=0), "0 segments"),
        (lambda: torus(0, 3), "torus: 0 × 3 ranks"),
        (lambda: two_level([]), "every rank from 0 on must sit on exactly one host"),
        (lambda: two_level([(0, 1), (1, 2)]), r"the hosts hold ranks \[0, 1, 1, 2\]"),
        (lambda: ring(3).for_rank(3), "there is no rank 3 among 3 ranks"),
        (lambda: Schedule("mine", 2, 0, ()), "mine: 0 chunks"),
    ],
)
def test_what_cannot_be_built_says_why(wrong: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrong()

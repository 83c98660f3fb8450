"""The ring: fair, the same for everyone, and calm when servers come and go."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.server.registrar.registrar import RANGES
from farandole.server.registrar.ring import place

crowds = st.sets(st.integers(1, 1000), min_size=1, max_size=12).map(sorted)


@settings(max_examples=30)
@given(servers=crowds, ranges=st.integers(1, 64), replicas=st.integers(0, 13))
def test_chains_are_long_enough_and_heads_are_shared_out_evenly(servers, ranges, replicas):
    chains = place(servers, ranges, replicas)
    assert len(chains) == ranges
    for chain in chains:
        assert len(chain) == min(replicas + 1, len(servers))
        assert len(set(chain)) == len(chain)
        assert set(chain) <= set(servers)
    heads = Counter(chain[0] for chain in chains)
    assert max(heads.values()) <= -(-ranges // len(servers))


@settings(max_examples=30)
@given(servers=crowds, seed=st.integers(0, 100), replicas=st.integers(0, 3))
def test_the_order_of_servers_does_not_matter(servers, seed, replicas):
    shuffled = [*servers, servers[0]]  # nor that one is named twice
    random.Random(seed).shuffle(shuffled)
    assert place(shuffled, RANGES, replicas) == place(servers, RANGES, replicas)


def test_nobody_holds_nothing():
    assert place([], 3, 1) == [(), (), ()]


def changed_heads(before: list[int], after: list[int]) -> int:
    """How many ranges have another head, of those that could have kept theirs."""
    pairs = zip(place(before, RANGES, 1), place(after, RANGES, 1), strict=True)
    return sum(old[0] != new[0] for old, new in pairs if old[0] in after)


@pytest.mark.parametrize("count", range(2, 13))
def test_few_ranges_move_when_a_server_comes_or_goes(count):
    """A newcomer must get a fair share; the bound on the load makes a few others move too.

    Dealing the ranges out by `range mod servers` would move 32 · (1 − 1/n) of them.
    """
    moved = []
    for first in (1, 101):
        servers = list(range(first, first + count))
        for gone in servers:
            left = [server for server in servers if server != gone]
            moved.append(changed_heads(servers, left))
            moved.append(changed_heads(left, servers))
    assert max(moved) <= RANGES // 2
    assert sum(moved) / len(moved) <= RANGES / count + 5

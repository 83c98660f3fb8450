"""Rounds, messages, bytes and fan-in of every algorithm, against what the textbooks say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.schedule import (
    ALGORITHMS,
    Facts,
    Schedule,
    build,
    double_tree,
    halving_doubling,
    naive,
    parameter_server,
    piece,
    ring,
    torus,
    two_level,
)

EVERY_SIZE = range(1, 65)
UNIT = 48  # bytes of a chunk


def assert_all(values: np.ndarray, expected: float) -> None:
    np.testing.assert_array_equal(values, np.full(len(values), expected))


@pytest.mark.parametrize("p", EVERY_SIZE)
def test_naive(p: int) -> None:
    facts = Facts.of(naive(p), 100)
    assert facts.rounds == (2 if p > 1 else 0)
    assert facts.bytes_sent[0] == facts.bytes_received[0] == (p - 1) * 100
    assert_all(facts.bytes_sent[1:], 100)
    assert_all(facts.bytes_received[1:], 100)
    assert facts.max_fan_in == facts.max_fan_out == p - 1


@pytest.mark.parametrize("p", EVERY_SIZE)
def test_parameter_server(p: int) -> None:
    facts = Facts.of(parameter_server(p), p * UNIT)
    assert facts.rounds == (2 if p > 1 else 0)
    assert_all(facts.bytes_sent, 2 * (p - 1) * UNIT)
    assert_all(facts.bytes_received, 2 * (p - 1) * UNIT)
    assert_all(facts.messages_sent, 2 * (p - 1))
    assert facts.max_fan_in == facts.max_fan_out == p - 1


@pytest.mark.parametrize("p", EVERY_SIZE)
def test_ring(p: int) -> None:
    facts = Facts.of(ring(p), p * UNIT)
    assert facts.rounds == 2 * (p - 1)
    assert_all(facts.bytes_sent, 2 * (p - 1) * UNIT)
    assert_all(facts.bytes_received, 2 * (p - 1) * UNIT)
    assert_all(facts.messages_sent, 2 * (p - 1))
    assert facts.max_fan_in == facts.max_fan_out == (1 if p > 1 else 0)


@pytest.mark.parametrize("p", EVERY_SIZE)
def test_halving_doubling(p: int) -> None:
    core = 2 ** (p.bit_length() - 1)
    folded = p - core
    n = core * UNIT
    facts = Facts.of(halving_doubling(p), n)
    assert facts.rounds == 2 * (p.bit_length() - 1) + (2 if folded else 0)
    assert_all(facts.bytes_sent[:folded], 2 * (core - 1) * UNIT + n)
    assert_all(facts.bytes_sent[folded:core], 2 * (core - 1) * UNIT)
    assert_all(facts.bytes_sent[core:], n)
    np.testing.assert_array_equal(facts.bytes_sent, facts.bytes_received)
    assert facts.max_fan_in == facts.max_fan_out == (1 if p > 1 else 0)


@pytest.mark.parametrize("p", EVERY_SIZE)
def test_double_tree(p: int) -> None:
    """Each rank is an inner node for one half of the vector at most: 2n bytes, no more."""
    segments = 4
    n = 2 * segments * UNIT
    facts = Facts.of(double_tree(p, segments), n)
    assert facts.rounds == (2 * (p.bit_length() - 1) + segments - 1 if p > 1 else 0)
    assert facts.bytes_sent.max() <= 2 * n
    assert facts.bytes_received.max() <= 2 * n
    assert facts.bytes_sent.sum() == 2 * (p - 1) * n
    assert facts.max_fan_in <= 4
    assert facts.max_fan_out <= 4


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (4, 1), (2, 2), (3, 4), (8, 8), (5, 3)])
def test_two_level_and_torus(hosts: int, per_host: int) -> None:
    p = hosts * per_host
    groups = [range(host * per_host, (host + 1) * per_host) for host in range(hosts)]
    for schedule in (two_level(groups), torus(per_host, hosts)):
        facts = Facts.of(schedule, p * UNIT)
        assert facts.rounds == 2 * (per_host - 1) + 2 * (hosts - 1)
        assert_all(facts.bytes_sent, 2 * (p - 1) * UNIT)
        assert_all(facts.bytes_received, 2 * (p - 1) * UNIT)
        assert facts.max_fan_in == facts.max_fan_out == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(0, 60))
def test_ring_on_lengths_that_do_not_divide(p: int, length: int) -> None:
    """A rank passes on every chunk but its own, then every chunk but the next rank's."""
    facts = Facts.of(ring(p), length)
    for rank in range(p):
        own, following = piece(rank, p, length), piece((rank + 1) % p, p, length)
        assert facts.bytes_sent[rank] == 2 * length - len(own) - len(following)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 16), st.integers(0, 100))
def test_facts_agree_with_the_views_of_the_ranks(name: str, p: int, length: int) -> None:
    schedule = build(name, p)
    facts = Facts.of(schedule, length)
    chunk_bytes = [len(piece(chunk, schedule.chunks, length)) for chunk in range(schedule.chunks)]
    fan_in = fan_out = 0
    for rank in range(p):
        view = schedule.for_rank(rank)
        sends = [move for turn in view for move in turn.sends]
        receives = [move for turn in view for move in turn.receives]
        fan_in = max([fan_in, *(len(turn.receives) for turn in view)])
        fan_out = max([fan_out, *(len(turn.sends) for turn in view)])
        assert facts.messages_sent[rank] == len(sends)
        assert facts.messages_received[rank] == len(receives)
        assert facts.bytes_sent[rank] == sum(sum(chunk_bytes[m.first : m.stop]) for m in sends)
        assert facts.bytes_received[rank] == sum(
            sum(chunk_bytes[m.first : m.stop]) for m in receives
        )
    assert (facts.max_fan_in, facts.max_fan_out) == (fan_in, fan_out)


def test_fan_in_is_not_fan_out() -> None:
    gather, spread = naive(6).rounds
    only_in = Facts.of(Schedule("mine", 6, 1, (gather,)), 10)
    assert (only_in.max_fan_in, only_in.max_fan_out) == (5, 1)
    only_out = Facts.of(Schedule("mine", 6, 1, (spread,)), 10)
    assert (only_out.max_fan_in, only_out.max_fan_out) == (1, 5)


def test_a_vector_cannot_have_less_than_no_bytes() -> None:
    with pytest.raises(UserError, match="a vector of -1 bytes"):
        Facts.of(ring(2), -1)

"""`auto`: the cheapest schedule by the measured link, or what the transport has of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm import Exchange, InProcess
from farandole.comm.choice import cheapest, choose
from farandole.errors import UserError
from farandole.schedule import ALGORITHMS, Link, build, cost_seconds

SLOW_START = Link(seconds_per_message=1e-3, seconds_per_byte=1e-9)
NARROW = Link(seconds_per_message=1e-6, seconds_per_byte=1e-6)


@given(
    ranks=st.integers(2, 12),
    magnitude=st.integers(0, 28),
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e-11, 1e-6),
)
def test_nothing_is_cheaper_than_the_cheapest(
    ranks: int, magnitude: int, alpha: float, beta: float
) -> None:
    link = Link(alpha, beta)
    nbytes = 1 << magnitude
    chosen, seconds = cheapest(ranks, nbytes, link)
    costs = {
        name: cost_seconds(build(name, ranks), nbytes, link)
        for name in ALGORITHMS
        if name != "two_level"
    }
    assert seconds == costs[chosen] == min(costs.values())
    assert cheapest(ranks, max(nbytes - nbytes // 3, 1), link) == (chosen, seconds)  # rounded up


def test_the_link_decides() -> None:
    assert cheapest(12, 4, SLOW_START)[0] != cheapest(12, 2**26, NARROW)[0]
    rounds = {name: len(build(name, 12).rounds) for name in ALGORITHMS}
    assert rounds[cheapest(12, 4, SLOW_START)[0]] < rounds["ring"]


class Plain(InProcess):
    """A transport whose own all-reduce is not known to be the fastest."""

    native_is_fastest = False


def test_who_asks_gets_what_they_asked_for() -> None:
    shared, network = InProcess(Exchange(4), 0), Plain(Exchange(4), 0)
    network.link = NARROW
    assert choose(shared, 2**20, "auto") == "native"
    assert choose(network, 2**20, "auto") == cheapest(4, 2**20, NARROW)[0]
    assert choose(network, 2**20, "auto", cuda=True) == "native"
    for name in [*ALGORITHMS, "native"]:
        assert choose(shared, 2**20, name) == name


def test_the_transports_own_is_a_candidate() -> None:
    """Whoever won at the nearest size that was tried, by powers of two."""
    network = Plain(Exchange(4), 0)
    network.link = NARROW
    network.native_wins = ((2**12, True), (2**16, False), (2**20, True))
    for nbytes, native in (
        (0, True), (1, True), (2**13, True), (2**14, False), (2**16, False), (2**17, False),
        (2**18, True), (2**19, True), (2**30, True),
    ):  # fmt: skip
        wanted = "native" if native else cheapest(4, nbytes, NARROW)[0]
        assert choose(network, nbytes, "auto") == wanted, nbytes
    assert choose(network, 1, "ring") == "ring"


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"algorithm 'rign'. Did you mean 'ring'\?"):
        choose(InProcess(Exchange(1), 0), 1, "rign")

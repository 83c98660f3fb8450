"""The seam: a transport that can only exchange messages has every collective."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm import Exchange, Group, InProcess
from farandole.comm.transports.base import Transport
from farandole.comm.transports.claims import (
    CLAIM_BYTES,
    decode_claim,
    encode_claim,
    require_agreement,
)
from farandole.comm.transports.messages import Message, PeerLost, name_ranks, numbered
from farandole.comm.transports.subset import Subset
from farandole.errors import CommError
from farandole.testing.conformance import CHECKS, Check


class Post(Transport):
    """Nothing but the two methods that a transport must have."""

    name = "post"

    def __init__(self, carrier: InProcess) -> None:
        super().__init__(carrier.rank, carrier.size, carrier.timeout)
        self._carrier = carrier

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._carrier.exchange(sends, receives)

    def subgroup(self, ranks: Sequence[int]) -> Post:
        return Post(self._carrier.subgroup(ranks))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_exchange_is_enough(on_ranks: Any, check: Check) -> None:
    def body(group: Group) -> None:
        assert isinstance(group.transport, InProcess)
        check(Group(Post(group.transport)))

    for outcome in on_ranks(3, body):
        if outcome is not None:
            raise outcome


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=400))
def test_a_claim_travels_unless_it_is_too_long(claim: str) -> None:
    frame = encode_claim(claim)
    assert len(frame) <= CLAIM_BYTES
    if len(claim.encode()) <= CLAIM_BYTES:
        assert decode_claim(frame.ljust(CLAIM_BYTES, b"\0")) == claim


@given(st.text(min_size=1, max_size=10), st.text(min_size=1, max_size=10))
def test_long_claims_that_differ_at_the_end_still_differ(one: str, other: str) -> None:
    frames = [encode_claim("x" * 300 + text) for text in (one, other)]
    assert (frames[0] == frames[1]) == (one == other)


def test_two_who_differ_are_told_apart_from_the_rest() -> None:
    require_agreement(["same"] * 3)
    with pytest.raises(CommError, match="rank 0 calls this, rank 2 calls that"):
        require_agreement(["this", "this", "that", "other"])


def test_ranks_by_name() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 3]) == "ranks 0, 3"
    assert str(PeerLost([1, 2], "hung up")) == "ranks 1, 2 hung up"


def test_inside_a_part_ranks_have_other_numbers() -> None:
    with pytest.raises(PeerLost, match="ranks 7, 5 hung up"), numbered([5, 6, 7]):
        raise PeerLost([2, 0], "hung up")


def test_a_subset_names_the_lost_by_its_own_numbers() -> None:
    exchange = Exchange(4, timedelta(seconds=0.1))
    errors: dict[int, PeerLost] = {}

    def work(rank: int) -> None:
        part = Subset(InProcess(exchange, rank), [3, 1])
        with pytest.raises(PeerLost) as caught:
            part.share("here")
        errors[rank] = part.blame(caught.value)

    thread = threading.Thread(target=work, args=(3,))  # rank 1 never comes
    thread.start()
    thread.join()
    assert errors[3].ranks == (1,)
    assert "did not answer" in errors[3].reason

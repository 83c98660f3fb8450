"""Announcements as they travel between ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Exchange, InProcess
from farandole.comm.transports.claims import CLAIM_BYTES
from farandole.horovod.engine.requests import ALLREDUCE, Request
from farandole.horovod.engine.table import NOTHING, Announcement
from farandole.horovod.engine.wire import OFFER, Listener, Speaker, exchange

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=2).map(tuple)
REQUESTS = st.builds(
    lambda name, shapes, root, scale, splits, without: Request(
        name,
        ALLREDUCE,
        ("float32",) * len(shapes),
        shapes,
        "sum",
        root,
        scale,
        1 / 3,
        "cpu",
        splits,
        without,
    ),
    st.sampled_from(["a", "b", "weight.0", 'quote"[,]', "größe", "allreduce.noname.3", ""]),
    SHAPES,
    st.integers(-1, 3),
    st.sampled_from([1.0, 0.1, 1e-300]),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.sampled_from([(), ("variable 1 (b:0)",)]),
)
ANNOUNCEMENTS = st.builds(
    Announcement,
    st.lists(REQUESTS, max_size=6, unique=True).map(tuple),
    st.booleans(),
    st.sampled_from(["", "has ended", "a\nb"]),
)


@settings(max_examples=40)
@given(st.lists(ANNOUNCEMENTS, max_size=5), st.sampled_from([0, 1, 3, 1024]))
def test_what_is_written_is_read(said: list[Announcement], capacity: int) -> None:
    speaker, listener = Speaker(capacity), Listener(capacity)
    for one in said * 2:
        heard = listener.read(speaker.write(one))
        assert set(heard.requests) == set(one.requests)
        assert len(heard.requests) == len(one.requests)
        assert heard[1:] == one[1:]


def test_the_second_time_only_numbers_are_sent() -> None:
    requests = tuple(Request(f"weight.{i}", ALLREDUCE, ("float32",), ((i,),)) for i in range(160))
    speaker, listener = Speaker(1024), Listener(1024)
    assert listener.read(speaker.write(Announcement(requests))).requests == requests
    assert speaker.write(Announcement(requests)) == "0-159"
    mixed = (requests[7], *requests[3:6], requests[159])
    assert speaker.write(Announcement(mixed)) == "7,3-5,159"
    assert listener.read("7,3-5,159").requests == mixed
    some = Announcement(requests[:2], joins=True)
    assert listener.read(speaker.write(some)) == some


def test_what_is_counted_up_gets_no_number() -> None:
    speaker = Speaker(4)
    once = Announcement((Request("allreduce.noname.7", ALLREDUCE),))
    assert speaker.write(once) == speaker.write(once)
    assert speaker.write(Announcement((Request("kept", ALLREDUCE),))).startswith("[")
    assert speaker.write(Announcement((Request("kept", ALLREDUCE),))) == "0"


def test_beyond_its_capacity_nothing_is_numbered() -> None:
    speaker, listener = Speaker(2), Listener(2)
    said = Announcement(tuple(Request(name, ALLREDUCE) for name in "abc"))
    for _ in range(3):
        assert listener.read(speaker.write(said)) == said
    assert "c" in speaker.write(said)


def test_silence() -> None:
    assert Speaker(4).write(NOTHING) == ""
    assert Listener(4).read("") == NOTHING
    assert Listener(4).read(OFFER) == NOTHING


# Between ranks


def on_ranks(size: int, body: Callable[[InProcess], list[str]]) -> list[list[str]]:
    meeting = Exchange(size)
    results: dict[int, list[str]] = {}

    def work(rank: int) -> None:
        results[rank] = body(InProcess(meeting, rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize(
    "texts",
    [
        ["", "", ""],
        ["0-5", "", "[1]"],
        ["x" * CLAIM_BYTES, "y", ""],
        ["x" * (CLAIM_BYTES + 1), "y", ""],
        ["ä" * CLAIM_BYTES, "", "z" * 70_000],
        ["x" * 3000, "y" * 3000, "z" * 3000],
    ],
)
def test_long_and_short_ones_in_one_round(texts: list[str]) -> None:
    heard = on_ranks(3, lambda transport: exchange(transport, texts[transport.rank]))
    assert heard == [texts] * 3


@pytest.mark.parametrize("length", [1, CLAIM_BYTES - 1, CLAIM_BYTES, 3000])
def test_an_offer_is_taken_when_all_make_it(length: int) -> None:
    """One that is too long for it is told in the usual way."""
    offered: list[str] = []

    def body(transport: InProcess) -> list[str]:
        def offer(claim: str) -> list[str]:
            offered.append(claim)
            return transport.share(claim)

        return exchange(transport, "x" * length, offer)

    fits = length < CLAIM_BYTES
    assert on_ranks(2, body) == [[("!" if fits else "") + "x" * length] * 2] * 2
    assert len(offered) == (2 if fits else 0)


@pytest.mark.parametrize("other", ["", "0", "!9", "y" * 3000])
def test_an_offer_that_others_do_not_make_is_heard_all_the_same(other: str) -> None:
    def body(transport: InProcess) -> list[str]:
        if transport.rank == 0:
            return exchange(transport, "5", transport.share)
        if other.startswith(OFFER):
            return exchange(transport, other[1:], transport.share)
        return exchange(transport, other)

    assert on_ranks(2, body) == [["!5", other]] * 2

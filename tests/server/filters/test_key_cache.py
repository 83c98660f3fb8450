"""Lists of rows by digest: whatever either end forgets, the right list arrives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.server.filters.key_cache import DIGEST_BYTES, KeyReceiver, KeySender, digest_of

row_lists = st.lists(
    st.sets(st.integers(0, 10**12), max_size=12).map(sorted), min_size=1, max_size=6
)
LISTS = st.shared(row_lists, key="lists")
limits = st.integers(0, 400)


def tensor(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@given(
    lists=row_lists,
    sends=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60),
    forgets=st.sets(st.integers(0, 59), max_size=3),
    restarts=st.sets(st.integers(0, 59), max_size=3),
    sender_limit=limits,
    receiver_limit=limits,
)
def test_the_right_list_arrives(
    lists: list[list[int]],
    sends: list[tuple[int, int]],
    forgets: set[int],
    restarts: set[int],
    sender_limit: int,
    receiver_limit: int,
) -> None:
    """Three senders share a receiver, which now and then is another one."""
    senders = [KeySender(sender_limit) for _ in range(3)]
    receiver = KeyReceiver(receiver_limit)
    for time, (who, which) in enumerate(sends):
        if time in forgets:
            senders[who].forget()
        if time in restarts:
            receiver = KeyReceiver(receiver_limit)
        rows = tensor(lists[which % len(lists)])
        packed = senders[who].pack(rows)
        if isinstance(packed, torch.Tensor):
            packed = packed.clone()  # as it arrives: in other memory, …
        found = receiver.unpack(packed)
        if found is None:
            assert isinstance(packed, bytes)
            packed = senders[who].pack_again(rows).clone()
            found = receiver.unpack(packed)
        assert found is not None
        assert torch.equal(found, rows)
        if isinstance(packed, torch.Tensor):
            packed.fill_(-1)  # … which is used again
        assert receiver.nbytes <= receiver_limit


@given(lists=row_lists, order=st.lists(st.integers(0, 5), max_size=60), limit=limits)
def test_one_sender_is_always_understood(
    lists: list[list[int]], order: list[int], limit: int
) -> None:
    sender, receiver = KeySender(limit), KeyReceiver(limit)
    for which in order:
        assert receiver.unpack(sender.pack(tensor(lists[which % len(lists)]))) is not None


@given(first=st.lists(st.integers(0, 9)), second=st.lists(st.integers(0, 9)))
def test_equal_digests_mean_equal_lists(first: list[int], second: list[int]) -> None:
    assert len(digest_of(tensor(first))) == DIGEST_BYTES
    assert (digest_of(tensor(first)) == digest_of(tensor(second))) == (first == second)


def test_digests_are_of_the_numbers_not_of_the_memory() -> None:
    assert digest_of(torch.arange(20)[::2]) == digest_of(torch.arange(0, 20, 2))


def test_a_list_travels_once() -> None:
    sender, rows = KeySender(1000), torch.arange(100)
    assert sender.pack(rows) is rows
    assert [sender.pack(rows.clone()) for _ in range(3)] == [digest_of(rows)] * 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_lists_no_longer_than_a_digest_travel_as_they_are(count: int) -> None:
    sender, receiver, rows = KeySender(1000), KeyReceiver(1000), torch.arange(count)
    for _ in range(2):
        packed = sender.pack(rows)
        assert packed is rows
        assert receiver.unpack(packed) is rows
    assert receiver.nbytes == 0


def test_lists_above_the_limit_are_never_kept() -> None:
    sender, receiver, rows = KeySender(799), KeyReceiver(799), torch.arange(100)
    for _ in range(2):
        assert sender.pack(rows) is rows
        receiver.unpack(rows)
    assert receiver.nbytes == 0


def test_the_list_that_was_used_longest_ago_is_forgotten() -> None:
    first, second, third = (torch.arange(start, start + 10) for start in (0, 100, 200))
    receiver = KeyReceiver(limit_bytes=160)  # two of them
    receiver.unpack(first)
    receiver.unpack(second)
    receiver.unpack(digest_of(first))  # uses it
    receiver.unpack(third)
    assert receiver.unpack(digest_of(second)) is None
    for rows in (first, third):
        found = receiver.unpack(digest_of(rows))
        assert found is not None
        assert torch.equal(found, rows)
    assert receiver.nbytes == 160


def test_after_forgetting_lists_travel_again() -> None:
    sender, rows = KeySender(1000), torch.arange(100)
    sender.pack(rows)
    sender.forget()
    assert sender.pack(rows) is rows

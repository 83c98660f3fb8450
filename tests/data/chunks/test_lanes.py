"""The order of an epoch over chunks: every sample once, and each process reads its own chunks."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farandole.data.chunks.lanes import Readers, lane_order
from farandole.data.shares import Shares

sizes_of_chunks = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum)


@st.composite
def readers_of(draw: st.DrawFn, count: int) -> Readers:
    ranks = draw(st.integers(1, min(4, count)))
    batch = draw(st.integers(ranks, ranks * 5))
    evaluates = draw(st.booleans())
    drop_last = draw(st.booleans()) and count >= batch
    return Readers(ranks, batch, draw(st.integers(1, 3)), drop_last, evaluates)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes_of_chunks, window=st.integers(1, 4), seed=st.integers(0, 9), data=st.data())
def test_every_sample_is_there_once(
    sizes: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    count = sum(sizes)
    readers = data.draw(readers_of(count))
    order = lane_order(sizes, readers.lanes(count), window, seed)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, lane_order(sizes, readers.lanes(count), window, seed))
    plain = lane_order(sizes, readers.lanes(count), window, None)
    assert plain.tolist() == list(range(count))


@settings(max_examples=150, deadline=None)
@given(
    chunks=st.integers(1, 12),
    size=st.integers(1, 9),
    window=st.integers(1, 4),
    data=st.data(),
)
def test_a_process_reads_each_of_its_chunks_once_with_a_window_at_hand(
    chunks: int, size: int, window: int, data: st.DataObject
) -> None:
    """And all processes together read a chunk more than once only where two of them share it."""
    count = chunks * size
    readers = data.draw(readers_of(count))
    assume(count % readers.global_batch == 0)  # else ranks read the samples of the tail together
    order = lane_order([size] * chunks, readers.lanes(count), window, 3)
    shares = Shares(count, readers.ranks, readers.global_batch)
    reads = 0
    for rank in range(readers.ranks):
        for process in range(readers.processes):
            at_hand: list[int] = []
            for step in range(process, shares.steps, readers.processes):
                for place in shares.share(step, rank):
                    chunk = int(order[place]) // size
                    if chunk in at_hand:
                        at_hand.remove(chunk)
                    else:
                        reads += 1
                    at_hand = [*at_hand, chunk][-window:]
    lanes = readers.ranks * readers.processes
    assert reads <= chunks + lanes - 1


def test_a_window_mixes_its_chunks_and_epochs_differ() -> None:
    readers = Readers(1, 8, 1, False, False)
    first, second = (lane_order([50] * 20, readers.lanes(1000), 5, seed) for seed in (1, 2))
    assert not np.array_equal(first, second)
    in_window = first[:250] // 50
    assert len(set(in_window.tolist())) == 5
    assert len(set(in_window[:25].tolist())) == 5  # none of them waits for another
    assert set(in_window.tolist()) != set(range(5))  # chunks are shuffled too

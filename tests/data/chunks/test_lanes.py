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
            steps = range(process, shares.steps, readers.processes)
            taken = [
                int(order[place]) // size for step in steps for place in shares.share(step, rank)
            ]
            spans = [
                (taken.index(each), len(taken) - taken[::-1].index(each)) for each in set(taken)
            ]
            at_hand = [sum(begin <= at < end for begin, end in spans) for at in range(len(taken))]
            assert max(at_hand, default=0) <= window
            reads += len(spans)
    lanes = readers.ranks * readers.processes
    assert reads <= chunks + lanes - 1


def test_a_window_mixes_its_chunks_and_epochs_differ() -> None:
    readers = Readers(1, 8, 1, False, False)
    first, second = (lane_order([50] * 20, readers.lanes(1000), 5, seed) for seed in (1, 2))
    assert not np.array_equal(first, second)
    chunks = first // 50
    for begin in (0, 400, 960):
        assert len(set(chunks[begin : begin + 40].tolist())) >= 5  # none waits for another
    assert set(chunks[:40].tolist()) != set(range(5))  # chunks are shuffled too

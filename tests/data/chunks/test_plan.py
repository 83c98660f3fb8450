"""What processes are told of chunks: before they need them, once, and how often they need them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.chunks.plan import planned

SIZE = 3  # samples of a chunk


@given(
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), max_size=20),
    processes=st.integers(1, 3),
    at_once=st.integers(0, 4),
)
def test_chunks_are_told_in_time_and_once(
    batches: list[list[int]], processes: int, at_once: int
) -> None:
    found = list(
        planned(lambda: batches, lambda batch: np.asarray(batch) // SIZE, processes, at_once)
    )
    assert [list(batch) for batch in found] == batches
    for process in range(processes):
        told: Counter[int] = Counter()
        used: Counter[int] = Counter()
        for turn, batch in enumerate(found[process::processes]):
            assert batch.begins == (turn == 0)
            for chunk, uses in batch.coming:
                assert chunk not in told
                told[chunk] = uses
            used.update(index // SIZE for index in batch)
            assert used.keys() <= told.keys()
            assert len(told) <= len(used) + at_once
        assert told == used

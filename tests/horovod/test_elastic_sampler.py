"""The elastic sampler: every sample of an epoch once, whoever comes and goes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole.horovod.torch as hvd
from farandole.horovod.torch.elastic import ElasticSampler, TorchState
from farandole.testing.horovod import run_horovod


@settings(max_examples=25)
@given(
    samples=st.integers(0, 23),
    batch_size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=4),
    shuffle=st.booleans(),
)
def test_once_over_any_resets(
    samples: int, batch_size: int, steps: list[tuple[int, int, bool]], shuffle: bool
) -> None:
    """In each step some workers do some batches with commits, and then perhaps one more batch that
    is lost because a worker dies before the next commit. In the last step they finish."""
    saved: dict[str, Any] = {"epoch": 5, "processed_indices": set()}
    times: Counter[int] = Counter()
    for size, batches, lost in [*steps, (2, 99, False)]:

        def work(
            saved: dict[str, Any] = saved, batches: int = batches, lost: bool = lost
        ) -> tuple[list[int], int, Any]:
            sampler = ElasticSampler(range(samples), shuffle=shuffle, seed=3)
            if hvd.rank() == 0:  # the others are new, or get it from there
                sampler.load_state_dict(saved)
            state = TorchState(sampler=sampler)
            state.sync()
            assert sampler.epoch == 5
            drawn = list(sampler)
            assert len(drawn) == len(sampler) == -(-len(sampler.remaining_indices) // hvd.size())
            seen: list[int] = []
            for batch in range(min(batches, -(-len(drawn) // batch_size))):
                seen += drawn[batch * batch_size : (batch + 1) * batch_size]
                sampler.record_batch(batch, batch_size)
                state.commit()
            if lost:
                sampler.record_batch(batches, batch_size)
            state.restore()
            padding = sampler.num_replicas - 1
            return seen, padding, sampler.state_dict()

        ranks = run_horovod(size, work)
        seen = Counter(index for indices, _, _ in ranks for index in indices)
        new = seen - Counter(seen.keys())
        assert sum(new.values()) <= ranks[0][1]  # who is seen twice only fills up the last round
        assert not times.keys() & seen.keys()  # nobody again after a reset
        times += Counter(seen.keys())
        for _, _, state in ranks:  # also of what a worker that dies now has seen
            assert state == {"epoch": 5, "processed_indices": set(times)}
        saved = ranks[-1][2]
    assert times == Counter(range(samples))


def test_epochs_are_shuffled_alike_on_all_ranks_and_differently_each() -> None:
    def work() -> tuple[list[int], list[int], list[int]]:
        sampler = ElasticSampler(range(40), seed=1)
        first = list(sampler)
        sampler.record_indices(first)
        sampler.set_epoch(1)
        second = list(sampler)
        plain = list(ElasticSampler(range(40), shuffle=False))
        return first, second, plain

    (first, second, plain), (others, *_) = run_horovod(2, work)
    assert sorted(first + others) == list(range(40))
    assert first != second
    assert len(second) == 20  # what was recorded in the epoch before does not count
    assert plain == list(range(0, 40, 2))


def test_with_a_loader() -> None:
    def work() -> list[torch.Tensor]:
        sampler = ElasticSampler(torch.arange(7), shuffle=False)
        batches = list(torch.utils.data.DataLoader(torch.arange(7), 2, sampler=sampler))
        assert [batch.tolist() for batch in batches] == [
            sampler.get_indices(0, 2),
            sampler.get_indices(1, 2),
        ]
        return batches

    first, second = run_horovod(2, work)
    assert [batch.tolist() for batch in first] == [[0, 2], [4, 6]]
    assert [batch.tolist() for batch in second] == [[1, 3], [5, 0]]

"""The cut of an epoch: every sample once, everyone equally often, on any numbers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from farandole.data import Shares
from farandole.data.order import mixed, shuffled
from farandole.data.streams.share import global_batches
from farandole.errors import UserError


@st.composite
def cuts(draw: st.DrawFn) -> Shares:
    size = draw(st.integers(1, 9))
    global_batch = draw(st.integers(size, 40))
    count = draw(st.integers(size, 200))
    drop_last, evaluates = draw(st.booleans()), draw(st.booleans())
    assume(not drop_last or count >= global_batch)
    return Shares(count, size, global_batch, drop_last, evaluates)


def as_stream(cut: Shares, done: int = 0) -> list[list[int]]:
    stream, evaluates = iter(range(cut.count)), cut.evaluates
    return list(
        global_batches(stream, cut.global_batch, cut.size, cut.drop_last, done, evaluates=evaluates)
    )


@given(cut=cuts())
def test_every_sample_is_used_exactly_once(cut: Shares) -> None:
    used = [i for step in range(cut.steps) for i in cut.global_range(step)]
    assert used == list(range(cut.count - cut.dropped))
    assert cut.dropped < cut.global_batch
    assert cut.drop_last or cut.dropped == 0


@given(cut=cuts())
def test_shares_of_a_step_make_up_its_batch_and_differ_by_at_most_one(cut: Shares) -> None:
    for step in range(cut.steps):
        whole = cut.global_range(step)
        shares = [cut.share(step, rank) for rank in range(cut.size)]
        read = [i for share in shares for i in share]
        if len(whole) < cut.size:
            assert not cut.evaluates
            assert read[: len(whole)] == list(whole)
        else:
            assert read == list(whole)
        lengths = [len(share) for share in shares]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1
        assert len(whole) >= cut.size or max(lengths) <= cut.global_batch // cut.size
        assert_sample_counts_once(cut, step, shares)


def assert_sample_counts_once(cut: Shares, step: int, shares: list[range]) -> None:
    counted: dict[int, float] = dict.fromkeys(cut.global_range(step), 0.0)
    for rank, share in enumerate(shares):
        own = cut.part(step, rank).samples
        assert cut.share_weight(step, rank) == pytest.approx(own * cut.size / len(counted))
        for sample in share:
            counted[sample] += own / len(share)
    assert list(counted.values()) == pytest.approx([1.0] * len(counted), rel=1e-12)


@given(cut=cuts())
def test_the_steps_are_those_of_one_worker(cut: Shares) -> None:
    alone = Shares(cut.count, 1, cut.global_batch, cut.drop_last)
    ours = [cut.global_range(step) for step in range(cut.steps)]
    theirs = [alone.global_range(step) for step in range(alone.steps)]
    if not cut.evaluates:
        assert ours == theirs
    elif len(ours) == len(theirs):  # a tail may have borrowed samples
        assert ours[:-2] == theirs[:-2]
    else:  # it has joined the batch before, which had none to lend
        assert ours[:-1] == theirs[:-2]
        assert cut.global_batch < 2 * cut.size


@given(cut=cuts())
def test_a_stream_is_cut_like_a_dataset_of_known_length(cut: Shares) -> None:
    assert as_stream(cut) == [list(cut.global_range(step)) for step in range(cut.steps)]


@given(cut=cuts(), data=st.data())
def test_the_rest_of_an_epoch_after_some_steps_is_the_same_steps(
    cut: Shares, data: st.DataObject
) -> None:
    steps_done = data.draw(st.integers(0, cut.steps))
    done = cut.global_range(steps_done - 1).stop if steps_done else 0
    rest = cut.after(done)
    batches = [range(done + r[0], done + r[-1] + 1) for r in _ranges(rest)]
    assert batches == [cut.global_range(step) for step in range(steps_done, cut.steps)]
    assert as_stream(cut, done) == [list(batch) for batch in batches]


@given(cut=cuts(), data=st.data())
def test_the_rest_after_any_sample_leaves_none_out(cut: Shares, data: st.DataObject) -> None:
    done = data.draw(st.integers(1, cut.count))
    left = cut.count - done
    # An evaluation that was saved on fewer workers warns: tested below.
    assume(cut.drop_last or not cut.evaluates or left == 0 or left >= cut.size)
    used = [i for whole in _ranges(cut.after(done)) for i in whole]
    expected = left - left % cut.global_batch if cut.drop_last else left
    assert used == list(range(expected))
    assert [i for batch in as_stream(cut, done) for i in batch] == list(
        range(done, done + expected)
    )


def _ranges(cut: Shares | None) -> list[range]:
    return [cut.global_range(step) for step in range(cut.steps)] if cut else []


def test_a_rest_too_small_to_evaluate_is_said_to_be_left_out() -> None:
    assert Shares(10, 3, 6, evaluates=True).after(8) is None
    with pytest.warns(UserWarning, match=r"the 2 sample\(s\) left .* 3 workers"):
        assert list(global_batches(range(10), 6, 3, done=8, evaluates=True)) == []
    assert list(global_batches(range(10), 6, 3, done=8)) == [[8, 9]]  # training shares them


@pytest.mark.parametrize(
    ("count", "size", "batch", "drop_last", "message"),
    [
        (3, 4, 8, False, "3 samples cannot be shared by 4 workers.*at most 3 workers"),
        (9, 4, 3, False, "a global batch of 3 cannot be shared by 4 workers.*>= 4"),
        (7, 2, 8, True, "drop_last would drop all 7 samples.*8"),
        (0, 1, 8, False, "the dataset is empty"),
        (0, 2, 8, True, "the dataset is empty"),
    ],
)
def test_cuts_that_cannot_be(
    count: int, size: int, batch: int, drop_last: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Shares(count, size, batch, drop_last)


@pytest.mark.parametrize(
    ("count", "size", "batch", "drop_last", "message"),
    [
        (3, 4, 8, False, "a stream of 3 samples cannot be shared by 4 workers"),
        (0, 1, 8, False, "a stream of 0 samples"),
        (7, 2, 8, True, "drop_last would drop all 7 samples"),
    ],
)
def test_streams_that_cannot_be_cut(
    count: int, size: int, batch: int, drop_last: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(global_batches(range(count), batch, size, drop_last))


@given(count=st.integers(1, 300), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_the_order_is_a_permutation_of_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert order == shuffled(count, seed, epoch)


def test_neighbouring_seeds_and_epochs_have_different_orders() -> None:
    orders = {tuple(shuffled(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {
        mixed(seed, epoch, rank) for seed in range(8) for epoch in range(8) for rank in range(8)
    }
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)

"""What each codec promises by itself: error bounds, what it chooses, how much smaller it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Group
from farandole.comm.codecs import Int8, PowerSgd, RandK, Sign, TopK, parse
from farandole.comm.codecs.compressor import is_finite
from farandole.comm.codecs.powersgd import _orthonormal
from farandole.comm.codecs.topk import largest_places

OnRanks = Callable[[int, Callable[[Group], Any]], list[Any]]


def gradient(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def averaged(
    on_ranks: OnRanks, text: str, make: Callable[[int], torch.Tensor], size: int = 3, steps: int = 1
) -> list[torch.Tensor]:
    """What comes out in each step when rank r gives `make(r)` every time."""

    def body(group: Group) -> list[torch.Tensor]:
        compressor, results = parse(text).build(), []
        for _ in range(steps):
            mine = make(group.rank).clone()
            compressor.average({"w": mine}, group)
            results.append(mine)
        return results

    first: list[torch.Tensor] = on_ranks(size, body)[0]
    return first


@given(
    rows=st.integers(32, 60),
    exponent=st.integers(-110, 110),
    spread=st.integers(0, 12),
    size=st.integers(2, 4),
)
@settings(max_examples=15, deadline=None)
def test_halves_round_twice_and_no_more(
    on_ranks: OnRanks, rows: int, exponent: int, spread: int, size: int
) -> None:
    def make(rank: int) -> torch.Tensor:
        mine = gradient(rank, rows, 40)
        mine[::3] *= 2.0**-spread  # float16 has this much room below the largest of a row
        return mine * 2.0**exponent

    parts = torch.stack([make(rank) for rank in range(size)]).double()
    for text, bits in (("fp16", 11), ("bf16", 8)):
        result = averaged(on_ranks, text, make, size)[0].double()
        bound = 2.0**-bits * (parts.abs().mean(0) + parts.mean(0).abs()) * 1.01
        assert ((result - parts.mean(0)).abs() <= bound).all()


@pytest.mark.parametrize("block", [1, 7, 256, 10_000])
def test_int8_is_off_by_half_a_step_at_sender_and_owner(on_ranks: OnRanks, block: int) -> None:
    parts = torch.stack([gradient(rank, 50, 41) for rank in range(3)])
    text = str(Int8(block=block, feedback=False))
    if block > 1:  # with a scale for every number it would not get smaller
        (result,) = averaged(on_ranks, text, lambda rank: parts[rank])
        largest = parts.abs().max()
        assert (result - parts.mean(0)).abs().max() <= 2 * 0.51 * largest / 127
        assert not torch.equal(result, parts.mean(0))
    assert Int8(block=block).compresses((50, 41), 4, 3) == (block > 1)


def test_a_small_block_keeps_small_numbers(on_ranks: OnRanks) -> None:
    def make(rank: int) -> torch.Tensor:
        mine = torch.full((2048,), 1e-4)
        mine[0] = 1.0
        return mine

    (fine,) = averaged(on_ranks, "int8:block=16/feedback=false", make)
    (coarse,) = averaged(on_ranks, "int8:block=100000/feedback=false", make)
    assert torch.allclose(fine[16:], torch.tensor(1e-4), rtol=0.01)
    assert not coarse[1:100].any()


def test_sign_without_feedback_is_a_majority_vote(on_ranks: OnRanks) -> None:
    signs = [torch.where(gradient(rank, 3000) >= 0, 1.0, -1.0) for rank in range(3)]
    (result,) = averaged(on_ranks, str(Sign(feedback=False)), lambda rank: signs[rank])
    assert torch.equal(result.sign(), sum(signs).sign())
    for owned in result.split(1000):
        assert len(owned.abs().unique()) == 1  # one size for each owner's row


def test_topk_sends_each_rank_s_largest(on_ranks: OnRanks) -> None:
    parts = [gradient(rank, 2000) for rank in range(3)]
    (result,) = averaged(on_ranks, "topk:ratio=0.05", lambda rank: parts[rank])
    expected = torch.zeros(2000)
    for part in parts:
        places = part.abs().topk(100).indices
        expected[places] += part[places] * (1 / 3)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
    assert TopK(ratio=0.05).kept(2000) == 100
    assert TopK(ratio=1e-9).kept(2000) == 1


@pytest.mark.parametrize("kind", ["normal", "few", "rows", "nan", "equal"])
def test_the_largest_of_many_are_found_by_sampling(kind: str) -> None:
    """The quick way must end with what the long one finds, whatever the numbers look like."""
    sizes = gradient(0, 300, 512).abs()
    if kind == "few":
        sizes[:, 3:] = 0  # fewer than are asked for
    elif kind == "rows":
        sizes[::2] *= 1000
    elif kind == "nan":
        sizes[17, 5] = torch.nan
        sizes[18, 5] = torch.inf
    elif kind == "equal":
        sizes.fill_(1.0)
    places = largest_places(sizes.view(-1), 1500)
    assert len(places.unique()) == 1500
    found = sizes.view(-1)[places].sort(descending=True).values
    expected = sizes.view(-1).topk(1500).values
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))


def test_large_numbers_are_finite() -> None:
    assert is_finite(torch.full((1000,), 3e38))  # though their sum is not
    assert not is_finite(torch.tensor([1.0, torch.inf, -torch.inf]))
    assert not is_finite(torch.tensor([torch.nan, 1.0]))


def test_randk_takes_one_of_each_stretch_and_others_each_time(on_ranks: OnRanks) -> None:
    steps = averaged(on_ranks, "randk:ratio=0.1", lambda rank: torch.ones(2005), steps=40)
    places = [set(step.nonzero().view(-1).tolist()) for step in steps]
    assert all(len(chosen) == RandK(ratio=0.1).kept(2005) == 200 for chosen in places)
    assert places[0] != places[1]
    assert len(set().union(*places)) > 1900  # each is missed with 0.9 ** 40
    other = averaged(on_ranks, "randk:ratio=0.1/seed=1", lambda rank: torch.ones(2005))[0]
    assert set(other.nonzero().view(-1).tolist()) != places[0]


def test_randk_without_feedback_is_right_in_the_mean(on_ranks: OnRanks) -> None:
    parts = [gradient(rank, 1100) for rank in range(2)]
    text = "randk:ratio=0.5/feedback=false"
    steps = averaged(on_ranks, text, lambda rank: parts[rank], size=2, steps=100)
    truth = torch.stack(parts).mean(0)
    # A number is doubled or missing: after 100 draws a tenth of it is left in the mean.
    error = (torch.stack(steps).mean(0) - truth).norm() / truth.norm()
    assert 0.05 < error < 0.15


def test_powersgd_finds_a_matrix_of_low_rank(on_ranks: OnRanks) -> None:
    factors = gradient(0, 60, 2), gradient(1, 2, 50)

    def make(rank: int) -> torch.Tensor:
        return (rank + 1) * (factors[0] @ factors[1])

    for step in averaged(on_ranks, "powersgd:rank=2", make, steps=3):
        torch.testing.assert_close(step, 2 * (factors[0] @ factors[1]), rtol=1e-4, atol=1e-4)


def test_powersgd_with_more_columns_than_the_rank_of_the_matrix(on_ranks: OnRanks) -> None:
    one = gradient(0, 60, 1) @ gradient(1, 1, 50)
    for step in averaged(on_ranks, "powersgd:rank=4", lambda rank: one, steps=3):
        torch.testing.assert_close(step, one, rtol=1e-4, atol=1e-4)


def test_powersgd_sends_matrices_of_its_rank_after_the_warm_steps(on_ranks: OnRanks) -> None:
    parts = [gradient(rank, 40, 8, 5) for rank in range(3)]
    text = "powersgd:rank=3/warm_steps=2"
    steps = averaged(on_ranks, text, lambda rank: parts[rank], steps=4)
    exact = torch.stack(parts).mean(0)
    for step, result in enumerate(steps):
        if step < 2:
            torch.testing.assert_close(result, exact)
        else:
            assert torch.linalg.matrix_rank(result.view(40, 40)) == 3


def test_orthonormal_columns() -> None:
    matrix = gradient(0, 30, 4).double()
    matrix[:, 2] = matrix[:, 0] - 2 * matrix[:, 1]
    result = _orthonormal(matrix)
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])).double()
    torch.testing.assert_close(result.T @ result, expected, rtol=0, atol=1e-12)
    assert not _orthonormal(torch.zeros(5, 2)).any()


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("fp16", lambda ranks: 2),
        ("bf16", lambda ranks: 2),
        ("int8", lambda ranks: 4 / (1 + 4 / 256)),
        ("sign", lambda ranks: 32),
        ("randk:ratio=0.01", lambda ranks: 100),
        ("topk:ratio=0.001", lambda ranks: 1000 / ranks),  # everyone's go to everyone
        ("powersgd:rank=4", lambda ranks: 1024 / 8),
    ],
)
def test_times_smaller(text: str, times: Callable[[int], float], ranks: int) -> None:
    assert parse(text).times_smaller((1024, 1024), 4, ranks) == pytest.approx(
        times(ranks), rel=0.02
    )


@pytest.mark.parametrize(
    ("text", "shape", "ranks"),
    [
        ("topk:ratio=0.5", (100, 100), 2),  # a place costs as much as a number
        ("topk:ratio=0.05", (100, 100), 30),
        ("randk:ratio=1", (100, 100), 2),
        ("powersgd", (10_000,), 2),
        ("powersgd", (10_000, 1), 2),
        ("powersgd:rank=50", (100, 100), 2),
        ("fp16", (1023,), 2),
        ("int8", (1024,), 1024),
    ],
)
def test_what_would_not_get_smaller_travels_raw(
    text: str, shape: tuple[int, ...], ranks: int
) -> None:
    codec = parse(text)
    assert not codec.compresses(shape, 4, ranks)
    assert codec.times_smaller(shape, 4, ranks) == 1
    assert PowerSgd(rank=49).compresses((100, 100), 4, 2)

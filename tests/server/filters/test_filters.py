"""Filters send less and lose nothing that counts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.filters import FILTERS, Filter, Kkt, Sieve, Significant, Skip, parse_filter
from farandole.server.rules import Proximal

ROWS, WIDTH = 6, 2

significants = st.builds(Significant, threshold=st.floats(0, 100))
skips = st.builds(Skip, probability=st.floats(0, 1, exclude_max=True), seed=st.integers())
kkts = st.builds(Kkt, l1=st.floats(0, 1e6), margin=st.floats(0, 1, exclude_max=True))
filters = st.one_of(significants, skips, kkts)
holding = st.one_of(significants, skips)  # those that lose nothing

# Whole numbers, of which floats add up exactly in any order.
numbers = st.integers(-100, 100)
row_lists = st.lists(st.integers(0, ROWS - 1), max_size=10)


@st.composite
def pushes(draw: st.DrawFn) -> tuple[list[int] | None, torch.Tensor]:
    """Rows in any order, some more than once, or all; and a line for each."""
    rows = draw(st.none() | row_lists)
    count = ROWS if rows is None else len(rows)
    flat = draw(st.lists(numbers, min_size=count * WIDTH, max_size=count * WIDTH))
    return rows, torch.tensor(flat, dtype=torch.float64).view(count, WIDTH)


def build(filter_: Filter, stream: str = "") -> Sieve:
    return filter_.build(ROWS, WIDTH, torch.float64, stream)


def push(
    sieve: Sieve, weight: torch.Tensor, rows: list[int] | None, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the weights that belong to these rows."""
    if rows is None:
        return sieve.sift(None, values, weight)
    numbers = torch.tensor(rows, dtype=torch.int64)
    return sieve.sift(numbers, values, weight[numbers])


def some_weights(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, (ROWS, WIDTH), generator=generator).double()


def added(total: torch.Tensor, rows: list[int] | torch.Tensor | None, values: torch.Tensor) -> None:
    where = torch.arange(ROWS) if rows is None else torch.as_tensor(rows, dtype=torch.int64)
    total.index_add_(0, where, values)


# ------------------------------------------------------------------ what all have in common


@given(filter_=holding, offered=st.lists(pushes(), max_size=8))
def test_nothing_is_lost(
    filter_: Filter, offered: list[tuple[list[int] | None, torch.Tensor]]
) -> None:
    sieve, weight = build(filter_), some_weights()
    wanted, sent = torch.zeros(ROWS, WIDTH).double(), torch.zeros(ROWS, WIDTH).double()
    for rows, values in offered:
        added(wanted, rows, values)
        added(sent, *push(sieve, weight, rows, values))
    added(sent, *sieve.flush())
    assert torch.equal(sent, wanted)
    again, _ = sieve.flush()
    assert not len(again), "it was sent"


@given(filter_=filters, offered=st.lists(pushes(), max_size=5))
def test_rows_are_sorted_and_come_once(
    filter_: Filter, offered: list[tuple[list[int] | None, torch.Tensor]]
) -> None:
    sieve, weight = build(filter_), some_weights()
    for rows, values in offered:
        before = values.clone()
        kept, sent = push(sieve, weight, rows, values)
        assert torch.equal(values, before), "the caller's own"
        asked = set(range(ROWS)) if rows is None else set(rows)
        assert kept.dtype == torch.int64
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert set(kept.tolist()) <= asked
        assert sent.shape == (len(kept), WIDTH)
        assert sent.dtype == torch.float64


@given(filter_=filters, offered=st.lists(pushes(), min_size=1, max_size=6), cut=st.integers(0, 6))
def test_going_on_from_a_state(
    filter_: Filter, offered: list[tuple[list[int] | None, torch.Tensor]], cut: int
) -> None:
    through, weight = build(filter_, "rank 1"), some_weights()
    for rows, values in offered[:cut]:
        push(through, weight, rows, values)
    resumed = build(filter_, "rank 1")
    for rows, values in offered[cut:]:  # which is to be forgotten
        push(resumed, weight, rows, values)
    resumed.load_state_dict(through.state_dict())
    for rows, values in offered[cut:]:
        for theirs, ours in zip(
            push(through, weight, rows, values), push(resumed, weight, rows, values), strict=True
        ):
            assert torch.equal(theirs, ours)
    for theirs, ours in zip(through.flush(), resumed.flush(), strict=True):
        assert torch.equal(theirs, ours)


@given(filter_=filters, offered=st.lists(pushes(), max_size=6))
def test_savings_are_counted(
    filter_: Filter, offered: list[tuple[list[int] | None, torch.Tensor]]
) -> None:
    sieve, weight = build(filter_), some_weights()
    answers = []
    rows_offered = bytes_offered = 0
    for rows, values in offered:
        count = ROWS if rows is None else len(set(rows))
        rows_offered += count
        bytes_offered += count * WIDTH * 8 + (0 if count == ROWS else count * 8)
        answers.append(push(sieve, weight, rows, values)[0])
    answers.append(sieve.flush()[0])
    sent = [len(kept) for kept in answers]
    assert sieve.savings.rows_offered == rows_offered
    assert sieve.savings.bytes_offered == bytes_offered
    assert sieve.savings.rows_sent == sum(sent)
    assert sieve.savings.bytes_sent == sum(
        count * WIDTH * 8 + (0 if count == ROWS else count * 8) for count in sent
    )


@pytest.mark.parametrize("rows", [[-1], [ROWS], [2, 1, ROWS + 3]])
@pytest.mark.parametrize("filter_", [Significant(), Skip(), Kkt()], ids=str)
def test_rows_that_are_not_there(filter_: Filter, rows: list[int]) -> None:
    values = torch.ones(len(rows), WIDTH, dtype=torch.float64)
    with pytest.raises(UserError, match=f"rows 0 to {ROWS - 1}; .*{max(rows)} are not all"):
        build(filter_).sift(torch.tensor(rows), values, values)


def test_values_that_do_not_fit() -> None:
    sieve = build(Skip())
    with pytest.raises(UserError, match=r"3 rows must be \(3, 2\) of torch.float64; it is \(2, 2"):
        sieve.sift(torch.arange(3), torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(UserError, match=r"6 rows must be \(6, 2\).* of torch.float32"):
        sieve.sift(None, torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("kind", FILTERS.values())
def test_who_needs_to_see_the_weights_says_so(kind: type[Filter]) -> None:
    values = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    if kind.needs_weight:
        with pytest.raises(UserError, match=r"seen last, \(6, 2\); given was None"):
            build(kind()).sift(None, values)
        with pytest.raises(UserError, match=r"given was \(5, 2\)"):
            build(kind()).sift(None, values, values[1:])
    else:
        build(kind()).sift(None, values)


@pytest.mark.parametrize("filter_", [Significant(), Kkt()], ids=str)
def test_tables_of_whole_numbers(filter_: Filter) -> None:
    with pytest.raises(UserError, match=r"takes floating-point tables; this one is torch\.int64"):
        filter_.build(ROWS, WIDTH, torch.int64)


def test_counts_can_be_skipped() -> None:
    sieve = Skip(probability=0.9).build(3, 1, torch.int64)
    ones = torch.ones(3, 1, dtype=torch.int64)
    sent = torch.zeros(3, 1, dtype=torch.int64)
    for _ in range(5):
        sent.index_add_(0, *sieve.sift(None, ones))
    sent.index_add_(0, *sieve.flush())
    assert sent.tolist() == [[5], [5], [5]]


# ------------------------------------------------------------------ significant


def test_significant_waits_until_it_is() -> None:
    sieve = Significant(threshold=0.25).build(2, 2, torch.float64)
    weight = torch.tensor([[8.0, 1.0], [0.0, 0.0]]).double()
    update = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()
    for _ in range(2):  # at most a quarter of the row's largest weight
        rows, _ = sieve.sift(None, update, weight)
        assert rows.tolist() == []
    rows, values = sieve.sift(None, update, weight)
    assert rows.tolist() == [0]
    assert values.tolist() == [[0.0, 3.0]]
    rows, _ = sieve.sift(None, update, weight)
    assert rows.tolist() == [], "it gathers from nothing again"


def test_beside_zero_anything_is_significant() -> None:
    sieve = Significant(threshold=0.9).build(2, 1, torch.float32)
    rows, _ = sieve.sift(None, torch.tensor([[1e-30], [0.0]]), torch.zeros(2, 1))
    assert rows.tolist() == [0], "but nothing is not"


@pytest.mark.parametrize("filter_", [Significant(threshold=1e6), Kkt(l1=1e6)], ids=str)
def test_what_is_no_number_does_not_wait(filter_: Filter) -> None:
    values = torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    rows, _ = filter_.build(2, 2, torch.float32).sift(
        None, values, torch.zeros(2, 2) if isinstance(filter_, Kkt) else torch.ones(2, 2)
    )
    assert rows.tolist() == [0]


# ------------------------------------------------------------------ skip


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_skipped(probability: float) -> None:
    count, times = 1000, 20
    sieve = Skip(probability=probability).build(count, 1, torch.float32)
    for _ in range(times):
        sieve.sift(None, torch.ones(count, 1))
    share = 1 - sieve.savings.rows_sent / sieve.savings.rows_offered
    deviation = math.sqrt(probability * (1 - probability) / (count * times))
    assert abs(share - probability) <= 5 * deviation


def test_draws_follow_from_the_seed_and_the_stream() -> None:
    def kept(seed: int, stream: str) -> list[list[int]]:
        sieve = Skip(seed=seed).build(100, 1, torch.float32, stream)
        return [sieve.sift(None, torch.ones(100, 1))[0].tolist() for _ in range(3)]

    first = kept(0, "rank 0")
    assert kept(0, "rank 0") == first
    assert kept(1, "rank 0") != first
    assert kept(0, "rank 1") != first
    assert first[0] != first[1]


# ------------------------------------------------------------------ kkt


@given(
    l1=st.floats(0.01, 10),
    margin=st.floats(0, 1, exclude_max=True),
    gradient=st.floats(-20, 20),
    weight=st.sampled_from([0.0, 0.0, 1e-12, -3.0]),
    rate=st.floats(0.01, 1),
)
def test_kkt_drops_only_what_changes_nothing(
    l1: float, margin: float, gradient: float, weight: float, rate: float
) -> None:
    before = torch.tensor([[weight]], dtype=torch.float64)
    pushed = torch.tensor([[gradient]], dtype=torch.float64)
    rows, _ = Kkt(l1=l1, margin=margin).build(1, 1, torch.float64).sift(None, pushed, before)
    is_dropped = not len(rows)
    assert is_dropped == (weight == 0 and abs(gradient) < l1 - margin * l1)
    if is_dropped:
        after = before.clone()
        Proximal(l1=l1).update(after, pushed, [], rate, 1)
        assert torch.equal(after, before)


def test_kkt_looks_at_whole_rows_and_keeps_nothing() -> None:
    sieve = Kkt(l1=1.0, margin=0.5).build(4, 2, torch.float64)
    weight = torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]).double()
    gradient = torch.tensor([[0.4, 0.4], [0.1, 0.1], [0.1, -0.6], [0.1, 0.5]]).double()
    rows, values = sieve.sift(None, gradient, weight)
    assert rows.tolist() == [1, 2, 3]
    assert torch.equal(values, gradient[1:])
    assert not len(sieve.flush()[0])
    assert sieve.state_dict() == {}


# ------------------------------------------------------------------ text


@given(filters)
def test_text_and_back(filter_: Filter) -> None:
    assert parse_filter(str(filter_)) == filter_
    assert "," not in str(filter_)  # which parts the options of the strategy around it


@pytest.mark.parametrize(
    ("text", "filter_"),
    [
        ("significant:threshold=0.02", Significant(threshold=0.02)),
        ("skip:probability=0.25/seed=3", Skip(probability=0.25, seed=3)),
        ("kkt", Kkt()),
    ],
)
def test_text_says_only_what_differs_from_the_defaults(text: str, filter_: Filter) -> None:
    assert str(filter_) == text
    assert parse_filter(f" {text.replace('/', ', ')} ") == filter_


@pytest.mark.parametrize("kind", FILTERS.values())
def test_filters_are_frozen_and_known_by_name(kind: type[Filter]) -> None:
    filter_ = kind()
    assert parse_filter(kind.name) == filter_
    with pytest.raises(dataclasses.FrozenInstanceError):
        filter_.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("skipp", "there is no filter 'skipp'. Did you mean 'skip'?"),
        ("", "there is no filter ''. Known: kkt, significant, skip."),
        ("int8:block=64", "'int8' is a codec, not a filter. Write codec=int8:block=64."),
        ("skip:share=0.5", "filter 'skip' has no option 'share'"),
        ("skip:probability=1", "skip: probability=1 must be 0 or more, and below 1"),
        ("skip:probability=-0.1", "skip: probability=-0.1 must be 0 or more"),
        ("skip:seed=x", "seed='x' is not a whole number"),
        ("significant:threshold=-1", "significant: threshold=-1 must be a number of at least 0"),
        ("significant:threshold=inf", "significant: threshold=inf must be a number"),
        ("kkt:l1=-1", "kkt: l1=-1 must be a number of at least 0"),
        ("kkt:margin=1", "kkt: margin=1 must be 0 or more, and below 1"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_filter(text)
    assert message in str(error.value)

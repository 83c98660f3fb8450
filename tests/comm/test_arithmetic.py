"""What is done with the numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.arithmetic import Op, check_op, combine_, divide_, reduce_into
from farandole.errors import UserError


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [
        ("sun", torch.float32, "Did you mean 'sum'?"),
        ("sum", torch.bool, "use op='max' for any, op='min' for all"),
        ("average", torch.bool, "a bool has no average"),
        ("average", torch.int64, "use op='sum' and divide"),
        ("min", torch.complex64, "complex numbers have no order"),
    ],
)
def test_what_makes_no_sense_is_refused(op: Op, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_op(op, dtype)
    assert said in str(caught.value)


FUNCTIONS = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


@given(
    numbers=st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    op=st.sampled_from([*FUNCTIONS, "average"]),
    into=st.integers(-1, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_parts_are_combined_whichever_of_them_is_written_to(
    numbers: list[int], op: Op, into: int, dtype: torch.dtype
) -> None:
    parts = [torch.tensor([float(number), 2.0], dtype=dtype) for number in numbers]
    wanted = functools.reduce(FUNCTIONS.get(op, torch.add), [part.clone() for part in parts])
    if op == "average":
        wanted = wanted / len(parts)
    out = parts[into] if 0 <= into < len(parts) else torch.empty(2, dtype=dtype)
    untouched = [(part, part.clone()) for part in parts if part is not out]
    reduce_into(out, parts, op)
    torch.testing.assert_close(out, wanted)
    for part, before in untouched:
        assert torch.equal(part, before)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_halves_are_rounded_once(count: int) -> None:
    one = torch.ones(1, dtype=torch.float16)
    parts = [one * 2048] + [one] * (count - 1)  # beside 2048 a half cannot see a single 1
    out = torch.empty_like(one)
    reduce_into(out, parts, "sum")
    assert float(out) == float(torch.tensor(2048.0 + count - 1).half())


def test_the_average_of_large_halves_is_not_infinite() -> None:
    parts = [torch.full((1,), 60000.0, dtype=torch.float16)] * 3
    out = torch.empty_like(parts[0])
    reduce_into(out, parts, "average")
    assert float(out) == float(parts[0])


def test_an_average_is_a_sum_until_it_is_divided() -> None:
    total = torch.tensor([1.0])
    combine_(total, torch.tensor([5.0]), "average")
    assert float(total) == 6
    divide_(total, "sum", 2)
    assert float(total) == 6
    divide_(total, "average", 2)
    assert float(total) == 3

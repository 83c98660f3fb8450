"""`run.mean` and `run.sum`: exact, and of the kind that was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.testing import run_world
from farandole.train import Run


def on_each(folder: Path, size: int, body: Callable[[Run], Any]) -> Any:
    """What all ranks agree on."""
    results = run_world(size, body, folder=folder)
    for result in results[1:]:
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, results[0])
        else:
            assert result == results[0]
    return results[0]


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_floats_keep_all_their_digits(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("floats")

    def body(run: Run) -> tuple[float, float]:
        return run.sum(values[run.rank]), run.mean(values[run.rank])

    total, mean = on_each(folder, len(values), body)
    exact = sum(map(Fraction, values))
    scale = sum(abs(value) for value in values)
    assert abs(Fraction(total) - exact) <= Fraction(scale) * Fraction(1, 2**50)
    assert mean == total / len(values)


@pytest.mark.parametrize("value", [3, True, 2.5])
def test_numbers_come_back_as_floats(tmp_path: Path, value: float) -> None:
    for result in on_each(tmp_path, 2, lambda run: (run.sum(value), run.mean(value))):
        assert type(result) is float
    assert on_each(tmp_path, 2, lambda run: run.sum(value)) == 2 * value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 0), (2, 3, 4)])
def test_float_tensors_keep_dtype_and_shape(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def given_to(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.rand(shape, generator=generator).to(dtype)

    exact = sum(given_to(rank).double() for rank in range(3))
    total = on_each(tmp_path, 3, lambda run: run.sum(given_to(run.rank)))
    mean = on_each(tmp_path, 3, lambda run: run.mean(given_to(run.rank)))
    assert torch.equal(total, exact.to(dtype))  # rounded once
    assert torch.equal(mean, (exact / 3).to(dtype))
    assert total.dtype == mean.dtype == dtype
    assert total.device == mean.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_add_up_to_int64_and_have_a_mean_in_float64(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    given_tensor = torch.tensor([[1, 0], [1, 1]], dtype=dtype) * (200 if dtype != torch.bool else 1)
    total = on_each(tmp_path, 3, lambda run: run.sum(given_tensor))
    mean = on_each(tmp_path, 3, lambda run: run.mean(given_tensor))
    assert (total.dtype, mean.dtype) == (torch.int64, torch.float64)
    assert torch.equal(total, given_tensor.long() * 3)
    assert torch.equal(mean, given_tensor.double())


def test_large_integers_are_exact(tmp_path: Path) -> None:
    """Beyond 2^53 a float64 would lose the last bit."""
    big = 2**60 + 1
    assert int(on_each(tmp_path, 3, lambda run: run.sum(torch.tensor(big)))) == 3 * big


def test_a_mean_of_integers_is_no_integer(tmp_path: Path) -> None:
    assert float(on_each(tmp_path, 2, lambda run: run.mean(torch.tensor(run.rank)))) == 0.5


@pytest.mark.parametrize("weights", [[1.0, 3.0], [0.0, 2.0], [10, 30]])
def test_weights(tmp_path: Path, weights: list[float]) -> None:
    def body(run: Run) -> tuple[float, float, float]:
        value, weight = 10.0 * (run.rank + 1), weights[run.rank]
        return (
            run.mean(value, weight),
            float(run.mean(torch.tensor(value), weight)),
            run.mean(value, torch.tensor(weight)),  # type: ignore[arg-type]
        )

    expected = (10 * weights[0] + 20 * weights[1]) / sum(weights)
    assert on_each(tmp_path, 2, body) == (expected, expected, expected)


def test_no_weight_at_all_has_no_mean(tmp_path: Path) -> None:
    results = run_world(2, lambda run: run.mean(1.0, weight=0), folder=tmp_path)
    assert all(math.isnan(result) for result in results)


def test_what_was_given_stays_as_it_was(tmp_path: Path) -> None:
    """The sum must not be written into the user's own tensor, nor carry its graph."""

    def body(run: Run) -> None:
        for value in (
            torch.ones(2, dtype=torch.float64),
            torch.ones(2, dtype=torch.int64),
            torch.ones(2, requires_grad=True),
        ):
            assert run.sum(value).tolist() == [2, 2]
            assert not run.mean(value).requires_grad
            assert value.tolist() == [1, 1]

    run_world(2, body, folder=tmp_path)


def test_nan_and_infinity_pass(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[bool, float]:
        return math.isnan(run.sum(math.nan if run.rank else 1.0)), run.mean(math.inf)

    assert on_each(tmp_path, 2, body) == (True, math.inf)

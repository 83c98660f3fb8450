"""Adasum: against a direct pairwise computation."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from farandole.comm import Exchange, InProcess
from farandole.horovod.engine.adasum import adasum_, coefficients


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula, in full."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    of_a = 1 - dot / (2 * aa) if aa > 0 else 1.0
    of_b = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return of_a * a + of_b * b


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours pairwise, level by level; who has no partner goes up as he is."""
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [pair(*two) if len(two) == 2 else two[0] for two in pairs]
    return vectors[0]


def closest_cancellation(vectors: list[torch.Tensor]) -> float:
    """How small the sum of a pair becomes beside the larger of the two. Adasum divides by its
    square, so that rounding errors grow by as much."""
    least = 1.0
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [pair(*two) if len(two) == 2 else two[0] for two in pairs]
        for two, sum_ in zip(pairs, vectors, strict=True):
            largest = max(float(each.norm()) for each in two)
            least = min(least, float(sum_.norm()) / largest) if largest else least
    return least


def on_ranks(vectors: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    meeting = Exchange(len(vectors))
    results = [vector.clone() for vector in vectors]

    def work(rank: int) -> None:
        adasum_(InProcess(meeting, rank), results[rank], lengths)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(vectors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def drawn(size: int, length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(size, length, generator=generator, dtype=torch.float64))


def test_orthogonal_vectors_are_added() -> None:
    assert coefficients([[4.0, 0.0], [0.0, 9.0]]) == [1.0, 1.0]


def test_equal_vectors_are_averaged() -> None:
    for size in (2, 4):
        assert coefficients([[3.0] * size] * size) == [1 / size] * size


def test_zeros_change_nothing() -> None:
    assert coefficients([[0.0, 0.0], [0.0, 5.0]])[1] == 1.0
    assert coefficients([[0.0, 0.0], [0.0, 0.0]]) == [1.0, 1.0]


def test_opposite_vectors() -> None:
    (a, b) = coefficients([[1.0, -1.0], [-1.0, 1.0]])
    assert (a, b) == (1.5, 1.5)  # together nothing, as they are each other's opposite


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_tree(size: int) -> None:
    vectors = drawn(size, 13, seed=size)
    for result in on_ranks(vectors, [13]):
        torch.testing.assert_close(result, tree(vectors), rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 99))
@example(5, [1, 2], 1)
def test_each_tensor_by_itself(size: int, lengths: list[int], seed: int) -> None:
    vectors = drawn(size, sum(lengths), seed)
    vectors[-1][: lengths[0]] = 0.0
    columns = [[v.split(lengths)[i] for v in vectors] for i in range(len(lengths))]
    assume(all(closest_cancellation(column) > 1e-2 for column in columns))
    parts = [tree(column) for column in columns]
    results = on_ranks(vectors, lengths)
    for result in results:
        torch.testing.assert_close(result, torch.cat(parts), rtol=1e-10, atol=1e-10)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    vectors = [vector.to(dtype) for vector in drawn(3, 9, seed=1)]
    expected = tree([vector.double() for vector in vectors]).to(dtype)
    for result in on_ranks(vectors, [9]):
        torch.testing.assert_close(result, expected)

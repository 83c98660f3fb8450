"""The bits of an update depend neither on the number of threads nor on where a range is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import Command, Kind
from farandole.server.rules import parse_rule
from farandole.server.rules.pieces import GRAIN, VECTORS, evenly_shared, pieces
from farandole.server.tables import Table

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TEXTS = [
    "add",
    "sgd",
    "sgd:momentum=0.9,nesterov,weight_decay=0.1",
    "sgd:momentum=0.9,dampening=0.3",
    "adagrad:weight_decay=0.1",
    "adam:amsgrad,weight_decay=0.1",
    "adamw",
    "proximal:l1=0.1,l2=0.1",
    "proximal:l1=0.1,l2=0.1,adaptive",
]
LENGTH = 100_003
each_rule = pytest.mark.parametrize("text", TEXTS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

counts = st.one_of(
    st.integers(1, 3 * GRAIN),
    st.builds(lambda parts, more: parts * GRAIN + more, st.integers(1, 99), st.integers(-99, 99)),
    st.integers(1, 10**9),
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def shares(count: int, threads: int) -> list[int]:
    """What each thread gets of a tensor, as torch does it."""
    if count < GRAIN or threads == 1:
        return [count]
    share = -(-count // min(threads, -(-count // GRAIN)))
    return [min(share, count - start) for start in range(0, count, share)]


@given(count=counts, threads=st.integers(1, 700))
def test_only_the_end_is_left_to_single_numbers(count: int, threads: int) -> None:
    left = count
    for _ in range(4):
        length = evenly_shared(left, threads)
        assert 0 < length <= left
        left -= length
        if not left:
            *others, last = shares(length, threads)
            assert all(share % VECTORS == 0 for share in others)
            assert not others or last % VECTORS == 0
            break
        assert all(share % VECTORS == 0 for share in shares(length, threads))
    assert not left, "a few pieces are enough"


class Lengths(TorchDispatchMode):
    """Notes how many numbers torch is asked to compute at once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            changed = result if isinstance(result, torch.Tensor) else args[0][0]
            self.found.add(changed.numel())
        return result


@each_dtype
@each_rule
@pytest.mark.parametrize("count", [2, 3, 7])
def test_what_threads_share_are_whole_vectors(text: str, dtype: torch.dtype, count: int) -> None:
    """On every CPU, also on those where vectors and single numbers round alike."""
    torch.set_num_threads(count)
    rule = parse_rule(text)
    weight, gradient = torch.ones(LENGTH, 1, dtype=dtype), torch.ones(LENGTH, 1, dtype=dtype)
    state = [torch.zeros_like(weight) for _ in rule.slots]
    with Lengths() as lengths:
        rule.update(weight, gradient, state, 0.1, 2)
    assert max(lengths.found) >= GRAIN, "several threads had work"
    for length in lengths.found:
        shared = shares(length, count)
        assert len(shared) == 1 or all(share % VECTORS == 0 for share in shared)


@each_dtype
@each_rule
def test_a_part_is_updated_as_if_alone(text: str, dtype: torch.dtype) -> None:
    """To the bit, wherever whole vectors begin and end."""
    rule = parse_rule(text)
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.randn(LENGTH, 1, generator=generator).to(dtype) for _ in range(4)]

    def updated(start: int, stop: int, threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        weight, *gradients = (tensor[start:stop].clone() for tensor in numbers)
        state = [torch.full_like(weight, rule.initial(slot)) for slot in rule.slots]
        for step, gradient in enumerate(gradients, start=1):
            rule.update(weight, gradient, state, 0.1, step)
        return [weight, *state]

    whole = updated(0, LENGTH, 1)
    for start, stop, threads in [
        (0, VECTORS, 1),
        (VECTORS, 1000 * VECTORS, 2),
        (3 * VECTORS, 1500 * VECTORS, 3),
        (VECTORS, LENGTH, 7),
        (1561 * VECTORS, LENGTH, 2),
    ]:
        for part, of in zip(updated(start, stop, threads), whole, strict=True):
            assert torch.equal(part, of[start:stop]), (start, stop, threads)


@pytest.mark.parametrize("shape", [(5, 7), (GRAIN, 3), (0, 4)])
def test_pieces_are_all_of_it_once(shape: tuple[int, int]) -> None:
    torch.set_num_threads(3)
    weight, gradient, slot = torch.zeros(shape), torch.ones(shape), torch.zeros(shape)
    for part, slope, (state,) in pieces(weight, gradient, [slot]):
        part += slope
        state += 2
    assert torch.equal(weight, torch.full(shape, 1.0))
    assert torch.equal(slot, torch.full(shape, 2.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_round_in_half_precision_loses_nobody(dtype: str) -> None:
    """A sum of 256 in bfloat16 would swallow every further 1."""
    table = Table.dense("t", 4, ranges=1, dtype=dtype, rounds=True)
    shard = TableShard(table, 0, parse_rule(table.rule))
    members = range(1, 5000)
    for member in members:
        values = torch.ones(4, dtype=table.torch_dtype)
        assert shard.push(Command(Kind.PUSH, 0, sender=member, stop=4, values=values))
    assert shard.end_round(frozenset(members))
    _, (weights, *_) = shard.state()
    assert weights.tolist() == [1.0] * 4

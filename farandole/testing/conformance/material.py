"""What the checks are made of: inputs that every rank can make for all ranks, and references.

Inputs are small whole numbers, so that sums and products are exact in every dtype and in any order
of adding: results are compared with ==, not nearly.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.comm import Group, Op
from farandole.schedule import ALGORITHMS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
WAYS = ("auto", "native", *ALGORITHMS)
LENGTHS = (0, 1, 7, 1000)
REGISTERED = 140_009  # elements: more than goes through a slot, and a prime number
LARGE = 1_400_003  # elements: more bytes than any transport moves at once, and a prime number


def ops(dtype: torch.dtype) -> Sequence[Op]:
    """Those that make sense for it."""
    if dtype == torch.bool:
        return ("min", "max", "product")
    if dtype.is_complex:
        return ("sum", "average", "product")
    if dtype.is_floating_point:
        return ("sum", "average", "min", "max", "product")
    return ("sum", "min", "max", "product")


def made(
    rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    """The input of `rank`: numbers from 1 to 3 (with an imaginary part, if there are such)."""
    return _made(rank, tuple(shape), dtype, salt).clone()


@functools.lru_cache(maxsize=32)
def _made(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randint(1, 4, shape, generator=generator)
    if dtype == torch.bool:
        return numbers > 1
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(0).float()).to(dtype)
    return numbers.to(dtype)


def reduced(parts: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    """All parts combined, one after the other, in one process."""
    functions = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}
    total = functools.reduce(functions.get(op, torch.add), parts)
    return total / len(parts) if op == "average" else total


def require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, not {tuple(wanted.shape)}"
    wrong = int((got != wanted).sum())
    assert not wrong, f"{what}: {wrong} of {got.numel()} wrong: {got} instead of {wanted}"


def require_same_bits(group: Group, tensor: torch.Tensor, what: str) -> None:
    """That every rank holds the same bytes, signs of zeros and kinds of NaN included."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    digests = group.gather_json(hashlib.sha256(raw).hexdigest())
    assert len(set(digests)) == 1, f"{what}: the ranks hold different bits: {digests}"


def require_error(kind: type[Exception], call: Callable[[], Any], what: str) -> str:
    """That `call` raises it; returns what it says."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}: {what}")

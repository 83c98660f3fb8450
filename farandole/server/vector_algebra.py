"""Sums of multiples and products of the slots of a shard, where the slots are.

For algorithms whose long vectors stay on the servers, such as L-BFGS: only a few numbers travel.
Products and sums are one operation each, never fused, and products are added up in blocks of one
size: so the bits do not depend on the number of threads, and replicas hold the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from farandole.errors import UserError

_BLOCK: Final = 4096
_MOST: Final = 1 << 16  # terms, or pairs, in one message

Combinations = Mapping[int, Mapping[int, float]]
"""What each slot becomes: {slot: {slot: coefficient}}."""


def write_combinations(combinations: Combinations) -> str:
    """As the text of a command."""
    return json.dumps(
        [
            [target, [[slot, value] for slot, value in terms.items()]]
            for target, terms in combinations.items()
        ]
    )


def read_combinations(text: str, slots: int) -> dict[int, dict[int, float]]:
    """Raises `UserError` for a text that is none, or names slots that are not there."""
    try:
        listed = [(target, list(terms)) for target, terms in json.loads(text)]
        found = {
            _slot(target, slots): {_slot(slot, slots): _coefficient(c) for slot, c in terms}
            for target, terms in listed
        }
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{text[:80]!r} are no sums of slots: {error}") from error
    if len(found) != len(listed) or not all(found.values()):
        raise UserError(f"{text[:80]!r}: each slot becomes one sum, of one term or more.")
    return found


def combine(tensors: list[torch.Tensor], combinations: Combinations) -> None:
    """All at once: each sum is made of what was there before."""
    made: dict[int, torch.Tensor] = {}
    for target, terms in combinations.items():
        total: torch.Tensor | None = None
        for slot, coefficient in terms.items():
            part = tensors[slot] * coefficient
            total = part if total is None else total.add_(part)
        assert total is not None
        made[target] = total
    for target, total in made.items():
        tensors[target] = total


def write_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    """As the text of a question."""
    return json.dumps([list(pair) for pair in pairs])


def read_pairs(text: str, slots: int) -> list[tuple[int, int]]:
    """Raises `UserError`."""
    try:
        found = [(_slot(one, slots), _slot(other, slots)) for one, other in json.loads(text)]
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{text[:80]!r} are no pairs of slots: {error}") from error
    if len(found) > _MOST:
        raise UserError(f"{len(found)} products at once; ask for {_MOST} or fewer.")
    return found


def products(tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Of each pair, in float64."""
    found = [_product(tensors[one], tensors[other]) for one, other in pairs]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    values = one.reshape(-1).double() * other.reshape(-1).double()
    whole = values.numel() - values.numel() % _BLOCK
    sums = values[:whole].view(-1, _BLOCK).sum(1)
    total = torch.zeros((), dtype=torch.float64)
    # A tree of blocks: each level by one operation on pairs, which rounds the same on any number
    # of threads.
    while sums.numel() > 1:
        half = sums.numel() // 2
        rest = sums[2 * half :]
        sums = torch.cat([sums[:half] + sums[half : 2 * half], rest])
    if sums.numel():
        total = total + sums[0]
    return total + values[whole:].sum()


def _slot(value: Any, slots: int) -> int:
    if type(value) is not int or not 0 <= value < slots:
        raise ValueError(f"{value!r} is no slot; there are {slots}.")
    return value


def _coefficient(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no coefficient.")
    return float(value)

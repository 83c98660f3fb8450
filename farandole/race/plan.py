"""Which runs a race consists of, and in which order: every lane with every seed, or halving.

seeds 0 and 1, 3 lanes     0: a b c    1: a b c          a stopped race has whole comparisons
halving, 4 lanes, 40 s     20 s: a b c d    40 s: a c    the better half gets twice the time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.errors import UserError
from farandole.race.runner import Entry
from farandole.report.lane import Lane
from farandole.report.standing import rank
from farandole.report.target import Target


@dataclass(frozen=True)
class PlannedRun:
    """`number` is the lane's, from 1. `budget_seconds`: None is no limit."""

    number: int
    entry: Entry
    seed: int
    budget_seconds: float | None = None


def read_seeds(text: str | None, first: int) -> tuple[int, ...]:
    """`3`: so many from `first` on; `0,7,9`: these. Raises `UserError` for one given twice."""
    if text is None:
        return (first,)
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = []
    is_count = "," not in text
    if not numbers or (is_count and numbers[0] < 1):
        raise UserError(
            f"--seeds {text!r}: give the number of seeds, such as 3, or the seeds, such as 0,7,9."
        )
    if is_count:
        return tuple(range(first, first + numbers[0]))
    twice = sorted({seed for seed in numbers if numbers.count(seed) > 1})
    if twice:
        raise UserError(
            f"--seeds {text}: seed {twice[0]} is asked for twice. A seed is run once in each lane."
        )
    return tuple(numbers)


def plan_runs(
    entries: Sequence[Entry], seeds: Sequence[int], budget_seconds: float | None
) -> list[PlannedRun]:
    return [
        PlannedRun(number, entry, seed, budget_seconds)
        for seed in seeds
        for number, entry in enumerate(entries, start=1)
    ]


def rounds_of(lanes: int) -> int:
    """How many rounds of halving leave one or two lanes with the whole budget."""
    rounds = 1
    while lanes > 2:
        lanes, rounds = -(-lanes // 2), rounds + 1
    return rounds


def better_half(
    runs: Sequence[PlannedRun], lanes: Sequence[Lane], target: Target | None
) -> list[int]:
    """The numbers of the lanes that go on: half of them, rounded up, and none that has failed."""
    ranked = [row for row in rank(lanes, target) if row.lane.outcome != "failed"]
    kept = sorted(row.index for row in ranked[: -(-len(lanes) // 2)])
    return [runs[index].number for index in kept]

"""Who goes on from whom, and with which choices.

After each interval the worst quarter of the members takes over weights and choices of the best
quarter, and changes the choices a little. A choice that decides the shape of the model keeps its
value, for the weights would not fit another one; now and then it changes all the same, and the
member starts anew with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from farandole.train.choosing.choice import Value

_FACTORS = (0.8, 1.2)
_NEW_STRUCTURE = 0.25  # how often a member that takes over another's choices changes these too


@dataclass(frozen=True)
class Heir:
    """What a member does in the next interval. `parent`: whose weights it goes on from."""

    choices: dict[str, Value]
    parent: int | None = None
    is_new: bool = False  # with another structure, and no weights


def exchange(
    ranked: Sequence[int],
    choices: Mapping[int, dict[str, Value]],
    spaces: Mapping[str, Mapping[str, Any]],
    structure: set[str],
    seeds: Sequence[int],
    alive: Set[int],
) -> dict[int, Heir]:
    """The next interval of every member; `ranked` are all of them, the best first.

    Those that are not `alive` have failed, and nobody goes on from them.
    """
    quarter = max(1, len(ranked) // 4) if len(ranked) > 1 else 0
    best = [number for number in ranked[:quarter] if number in alive]
    found = {number: Heir(choices[number]) for number in ranked}
    for number in ranked[len(ranked) - quarter :]:
        random = np.random.default_rng([*seeds, number])
        parent = int(best[random.integers(len(best))])
        taken = choices[parent]
        is_new = any(n in structure for n in taken) and random.random() < _NEW_STRUCTURE
        changed = {
            name: perturbed(value, spaces[name], random)
            if is_new or name not in structure
            else value
            for name, value in taken.items()
        }
        is_new = is_new and any(changed[n] != taken[n] for n in taken if n in structure)
        found[number] = Heir(changed, None if is_new else parent, is_new)
    return found


def sample(space: Mapping[str, Any], random: np.random.Generator) -> Value:
    """Any value, evenly, on the scale of the choice."""
    if "options" in space:
        return _option(space, int(random.integers(len(space["options"]))))
    low, high = float(space["low"]), float(space["high"])
    if space.get("log"):
        return fitted(float(np.exp(random.uniform(np.log(low), np.log(high)))), space)
    return fitted(random.uniform(low, high), space)


def perturbed(value: Value, space: Mapping[str, Any], random: np.random.Generator) -> Value:
    """A value near it: a fifth more or less, the next one of an integer, a neighbouring option."""
    up = bool(random.integers(2))
    if "options" in space:
        at = [str(option) for option in space["options"]].index(str(value))
        return _option(space, min(len(space["options"]) - 1, max(0, at + (1 if up else -1))))
    assert isinstance(value, (int, float))
    if space.get("log"):
        near = value * _FACTORS[up]
    else:
        near = value + (1 if up else -1) * 0.2 * (space["high"] - space["low"])
    least = space.get("step") or (1 if isinstance(value, int) else 0.0)
    if abs(near - value) < least:
        near = value + (least if up else -least)
    return fitted(near, space)


def fitted(value: float, space: Mapping[str, Any]) -> Value:
    """The nearest value that the choice has."""
    low, high, step = space["low"], space["high"], space.get("step")
    value = min(float(high), max(float(low), value))
    if step is not None:
        value = min(float(high), low + round((value - low) / step) * step)
    is_integer = isinstance(low, int) and isinstance(high, int)
    return round(value) if is_integer else float(value)


def _option(space: Mapping[str, Any], at: int) -> Value:
    found: Value = space["options"][at]
    return found

"""The learning-rate schedulers of a script, which it has not shown to anybody.

A scheduler counts steps, and a worker that joins must count on from where the others are. Nothing
leads from an optimizer to its schedulers, so they are looked for among all objects of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from farandole.errors import UserError


def schedulers_of(optimizers: Sequence[Optimizer]) -> dict[str, LRScheduler]:
    """By their kind. Raises `UserError` where two of one kind could not be told apart."""
    found: dict[str, LRScheduler] = {}
    for each in _outermost(optimizers):
        place = next(i for i, known in enumerate(optimizers) if known is each.optimizer)
        name = f"{place} {type(each).__name__}"
        if name in found:
            raise UserError(
                f"two schedulers of kind {type(each).__name__} act on one optimizer, and a worker "
                "that joins could not tell them apart. Put them into one "
                "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
            )
        found[name] = each
    return found


def scheduler_states(optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    return {name: each.state_dict() for name, each in schedulers_of(optimizers).items()}


def load_scheduler_states(
    optimizers: Sequence[Optimizer], states: dict[str, dict[str, Any]]
) -> None:
    """Raises `UserError` when this process has other schedulers."""
    here = schedulers_of(optimizers)
    if here.keys() != states.keys():
        raise UserError(
            f"this worker has the schedulers {sorted(here) or 'none'}, and the others "
            f"{sorted(states) or 'none'}: they do not run the same script."
        )
    for name, state in states.items():
        here[name].load_state_dict(state)


def _outermost(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    """Those that are not parts of others."""
    kinds = (LRScheduler, ReduceLROnPlateau, ChainedScheduler, SequentialLR)
    everything = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), kinds)
        and any(each.optimizer is optimizer for optimizer in optimizers)
    ]
    inner = {
        id(part)
        for each in everything
        for part in (*getattr(each, "_schedulers", ()), *_warmup(each))
    }
    return [each for each in everything if id(each) not in inner]


def _warmup(scheduler: Any) -> tuple[Any, ...]:
    """Schedulers that another one holds by some other name."""
    return tuple(value for value in vars(scheduler).values() if isinstance(value, LRScheduler))

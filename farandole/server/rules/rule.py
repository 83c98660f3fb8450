"""What a server does with what is pushed, on paper: a name, options and a text form.

A rule is a frozen dataclass. It keeps nothing itself: its state lies in *slots*, tensors of the
weights' shape that the server keeps, replicates and saves beside the weights.

The same update must give the same bits on every replica, however many cores that has. So a rule may
depend on what `update` is given, and on nothing else: no random numbers, no time, no memory of its
own. And it cuts what it is given where `pieces` says: else the last bit may depend on the number of
threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from farandole.errors import UserError
from farandole.options import format_options


@dataclass(frozen=True)
class Rule(ABC):
    """How a push changes weights. Subclasses are frozen dataclasses.

    One that has no `name` of its own is known by its module's and its class's: write none in yours.
    """

    name: ClassVar[str]
    takes_integers: ClassVar[bool] = False
    """Whether it works on tables of whole numbers too."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}.{cls.__qualname__}"

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its state tensors, in the order in which `update` gets them."""
        return ()

    def initial(self, slot: str) -> float:
        """What a slot is filled with at first."""
        return 0.0

    @abstractmethod
    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        """Changes some rows of weights and their state in place, and leaves `gradient` alone.

        All are matrices of the same shape and dtype, contiguous. `step` counts the table's updates
        from 1, also those that had none of these rows.
        """

    def __str__(self) -> str:
        """The text form: `sgd:momentum=0.9,nesterov`."""
        options = format_options(self)
        return f"{self.name}:{options}" if options else self.name


def require_at_least(rule: Rule, option: str, least: float) -> None:
    value = getattr(rule, option)
    if not least <= value < math.inf:  # nor NaN
        raise UserError(f"{rule.name}: {option}={value:g} must be a number of at least {least:g}.")


def require_share(rule: Rule, option: str) -> None:
    value = getattr(rule, option)
    if not 0 <= value < 1:
        raise UserError(f"{rule.name}: {option}={value:g} must be 0 or more, and below 1.")

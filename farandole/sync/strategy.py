"""The seam between a run and the ways of keeping replicas in step.

A `Strategy` is a frozen dataclass: it can be read, compared, printed and planned with, without
building anything. `build` turns it into a `Synchronizer`, which lives as long as the model does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.options import format_options


class Synchronizer(Protocol):
    """A strategy at work on one model."""

    model: nn.Module  # what the user calls; `unwrapped` is what they passed in
    unwrapped: nn.Module

    def weigh(self, weight: float) -> None:
        """Says how this rank's next batch compares with the average one (1.0: equal)."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients accumulate locally inside, to be averaged by the next backward outside."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, beside model and optimizer, to go on as if never stopped."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Strategy(ABC):
    """How replicas stay in step. Subclasses are frozen dataclasses with a `name`."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        """Puts the strategy to work. Called on all ranks, with the same model on each."""

    def __str__(self) -> str:
        """The text form, as on the command line: `local:every=8`."""
        options = format_options(self)
        return f"{self.name}:{options}" if options else self.name

"""The seam between a run and the ways of keeping replicas in step.

A `Strategy` is a frozen dataclass: it can be read, compared, printed and planned with, without
building anything. `build` turns it into a `Synchronizer`, which lives as long as the model does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from farandole import options
from farandole.comm import Group
from farandole.errors import UserError
from farandole.options import format_options
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.common.guard import GradientGuard
from farandole.sync.common.weighing import Weighing
from farandole.topology import Topology


class Synchronizer:
    """A strategy at work on one model, which stays the script's own object: nothing is put around
    it. What a strategy has no use for does nothing here.

    Everything but `report` and `hear` is called by all ranks, in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        weighing: Weighing | None = None,
        reducer: GradientReducer | None = None,
        guard: GradientGuard | None = None,
    ) -> None:
        """Those who act on gradients while a backward pass computes them are given here, and who
        looks at them before a step."""
        self.model = model
        self.guard = guard
        """What stops before gradients are applied that are not finite."""
        self._weighing = weighing
        self._reducer = reducer
        self.in_step_after_pass = True
        """Whether all ranks hold the same parameters after `end_pass`."""
        self.notes: list[dict[str, float | str]] = []
        """Decisions, such as a new period, since somebody last took them out of here."""

    def check_finite(self, on: bool) -> None:
        """Whether what is not finite stops the run. It does by default."""
        if self.guard is not None:
            self.guard.is_on = on
        if self._reducer is not None:
            self._reducer.notes_culprits = on

    def share_samples(self, readers: int) -> None:
        """Before that: each sample of the batch is read by so many ranks, and counts once."""
        if self._weighing is not None:
            self._weighing.readers = readers

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        """Before each training batch: how this rank's compares with the average one (1.0: equal),
        how much of the whole run is done, if that is known, and how many samples it counts as."""
        if self._weighing is not None:
            self._weighing.weight = weight

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients accumulate locally inside, to be averaged by the next backward outside."""
        return nullcontext() if self._reducer is None else self._reducer.no_sync()

    @property
    def follows_gradients(self) -> bool:
        return self._weighing is not None or self._reducer is not None

    def listen(self, on: bool) -> None:
        """Whether backward passes are this strategy's business.

        A pipeline has many in a step that only add up, and one in the end that is.
        """
        if self._weighing is not None:
            self._weighing.is_on = on
        if self._reducer is not None:
            self._reducer.is_on = on

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        """This rank's loss of a batch."""

    def hear(self, loss: float) -> None:
        """The loss that the script logs. Rank 0's counts."""

    def begin_pass(self) -> None:
        """Before each pass over the training data."""
        if self._reducer is not None:
            self._reducer.follow_changes()

    def end_pass(self) -> None:
        """After each of them. Most strategies bring all ranks in step here."""
        if self._weighing is not None:
            self._weighing.weight, self._weighing.readers = 1.0, 1

    def whole_model(self) -> dict[str, Any]:
        """The state of the one model that all replicas together stand for; changes nothing."""
        return self.model.state_dict()

    def close(self) -> None:
        """At the end of the run. Waits for nobody."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, beside model and optimizer, to go on as if never stopped.

        It is this rank's own, and may hold its model and optimizer where they differ from others'.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Comes after the common model and optimizer were loaded."""


class Strategy(ABC):
    """How replicas stay in step. Subclasses are frozen dataclasses with a `name`."""

    name: ClassVar[str]
    needs_servers: ClassVar[bool] = False
    shorthands: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Words that stand for an option: `server:async` is `server:staleness=async`."""

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        """Puts the strategy to work. Called on all ranks, with the same model on each."""

    def check_place(self, topology: Topology, device: str = "cpu") -> None:  # noqa: B027
        """Raises `UserError` where the strategy cannot work: before anything is built, or started.

        `device` is the kind of device that the ranks compute on: cpu or cuda.
        """

    def __str__(self) -> str:
        """The text form, as on the command line: `local:every=8`."""
        options = format_options(self)
        return f"{self.name}:{options}" if options else self.name


def require_optimizer(strategy: Strategy, optimizer: Optimizer | None) -> Optimizer:
    """For strategies that act on the optimizer's steps."""
    if optimizer is None:
        raise UserError(
            f"{strategy.name} counts the optimizer's steps and was given none. Write "
            "`model, opt = run.distribute(model, opt)`."
        )
    return optimizer


def require_at_least(strategy: Strategy, option: str, least: float) -> None:
    value = getattr(strategy, option)
    if not value >= least:  # nor NaN
        raise UserError(f"{strategy.name}: {option}={value:g} must be at least {least:g}.")


def require_choices(strategy: Strategy) -> None:
    """Options that are one of a few words."""
    options.require_choices(strategy, strategy.name)


def require_share(strategy: Strategy, option: str) -> None:
    value = getattr(strategy, option)
    if not 0 <= value < 1:
        raise UserError(
            f"{strategy.name}: {option}={value:g} must be a share: 0 or more, and below 1."
        )

"""The interface between a run and the strategies that keep replicas in step.

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
    """A strategy at work on one model. The model stays the script's own object, without a wrapper.

    All ranks call every method in the same order, except `observe_loss` and `hear`. Methods that a
    strategy does not override do nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        weighing: Weighing | None = None,
        reducer: GradientReducer | None = None,
        guard: GradientGuard | None = None,
    ) -> None:
        """`weighing` and `reducer` act on gradients while a backward pass computes them; `guard`
        checks gradients before a step."""
        self.model = model
        self.guard = guard
        """Stops before gradients that are not finite are applied."""
        self._weighing = weighing
        self._reducer = reducer
        self.in_step_after_pass = True
        """Whether all ranks hold the same parameters after `end_pass`."""
        self.notes: list[dict[str, float | str]] = []
        """Decisions, such as a new period, since the run last took them out of here."""

    def check_finite(self, on: bool) -> None:
        """Sets whether numbers that are not finite stop the run. They do by default."""
        if self.guard is not None:
            self.guard.is_on = on
        if self._reducer is not None:
            self._reducer.notes_culprits = on

    def work_beside(self, other: Optimizer) -> None:
        """Another model of this run is trained by `other`. Told once, before its first step."""

    def share_samples(self, readers: int) -> None:
        """Called before `begin_step`: so many ranks read each sample of the batch, which counts
        once."""
        if self._weighing is not None:
            self._weighing.readers = readers

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        """Called before each training batch.

        `weight` is the size of this rank's batch over that of the average batch. `progress` is the
        share of the whole run that is done, if that is known. The batch counts as `samples`.
        """
        if self._weighing is not None:
            self._weighing.weight = weight

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients accumulate locally; the next backward outside averages their sum."""
        return nullcontext() if self._reducer is None else self._reducer.no_sync()

    @property
    def follows_gradients(self) -> bool:
        return self._weighing is not None or self._reducer is not None

    def listen(self, on: bool) -> None:
        """Sets whether backward passes are averaged.

        A pipeline has many backward passes in a step. All but the last only add up.
        """
        if self._weighing is not None:
            self._weighing.is_on = on
        if self._reducer is not None:
            self._reducer.is_on = on

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        """Takes this rank's loss of a batch."""

    def hear(self, loss: float) -> None:
        """Takes the loss that the script logs. Only rank 0's counts."""

    def begin_pass(self) -> None:
        """Called before each pass over the training data."""
        if self._reducer is not None:
            self._reducer.follow_changes()

    def end_pass(self) -> None:
        """Called after each such pass. Most strategies bring all ranks in step here."""
        if self._weighing is not None:
            self._weighing.weight, self._weighing.readers = 1.0, 1

    @property
    def order(self) -> list[str] | None:
        """In which gradients are expected, if that is known: the same on all ranks."""
        return None if self._reducer is None else self._reducer.order

    def regroup(self, order: list[str] | None) -> None:
        """*Together.* Ranks have come: goes on with them, and with gradients in this `order`."""

    def rescale(self, factor: float, *, within_step: bool) -> None:
        """A rank was lost: this rank's samples that are not in a step yet count `factor` times as
        much. `within_step`: their gradients are being averaged."""
        if self._weighing is not None:
            self._weighing.weight *= factor
        if not within_step:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def whole_model(self) -> dict[str, Any]:
        """The state of the model that all replicas together stand for. Changes no replica."""
        return self.model.state_dict()

    def close(self) -> None:
        """Called at the end of the run. Waits for no other rank."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, beside model and optimizer, to go on as if never stopped.

        The state is this rank's own. It holds this rank's model and optimizer where they differ
        from other ranks'.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state. Called after the common model and optimizer were loaded."""


class Strategy(ABC):
    """How replicas stay in step. Subclasses are frozen dataclasses with a `name`."""

    name: ClassVar[str]
    needs_servers: ClassVar[bool] = False
    shorthands: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Words that stand for an option: `server:async` is `server:staleness=async`."""

    @property
    def why_not_elastic(self) -> str | None:
        """Why workers cannot come and go in a job with this strategy; None: they can."""
        return "its workers depend on state that only they hold"

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        """Builds the synchronizer. Called on all ranks, with the same model on each."""

    def check_place(self, topology: Topology, device: str = "cpu") -> None:  # noqa: B027
        """Raises `UserError` where the strategy cannot work. Called before anything is started.

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

"""What carries out a trainer's step: here, with the whole model on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.layout.arguments import arguments_of, call
from farandole.sync import Strategy
from farandole.train.distribute import distribute_whole
from farandole.train.engines.recipe import Recipe
from farandole.train.session import Session


class Engine(ABC):
    """Every method is called by all ranks together."""

    model: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Trains on one batch; returns its loss."""

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The model's output, in evaluation mode, without gradients."""

    def reading(self, source: Any) -> tuple[Any, Callable[[Any], Any] | None]:
        """What this rank reads of a dataset, and what is done to its batches; None: nothing."""
        return source, None


class WholeModelEngine(Engine):
    """The step that a script would write itself."""

    def __init__(
        self, session: Session, model: nn.Module, recipe: Recipe, sync: Strategy | None
    ) -> None:
        self._session = session
        self._recipe = recipe
        # Half-precision gradients vanish unless the loss is scaled up; those of bfloat16 do not.
        self._scaler = torch.amp.GradScaler(
            session.device.type, enabled=recipe.precision is torch.float16
        )
        self.optimizer = recipe.make_optimizer(model.to(session.device).parameters())
        self.model = distribute_whole(session, model, self.optimizer, sync)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        given = self._recipe.objective.arguments(inputs, targets)
        with self._lowered():
            loss = self._recipe.objective.of(call(self.model, given), targets)
        self._scaler.scale(loss).backward()
        self._session.models.observe_loss(loss)
        if self._recipe.clip is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss.detach()

    def predict(self, inputs: Any) -> Any:
        model = self.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self._lowered():
                return call(model, arguments_of(inputs))
        finally:
            model.train(training)

    def _lowered(self) -> AbstractContextManager[object]:
        if self._recipe.precision is None:
            return nullcontext()
        return torch.autocast(self._session.device.type, self._recipe.precision)

"""One Keras model under a strategy: what happens at each step and each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.keras.weights import Weights, tensors
from farandole.sync import Strategy
from farandole.train.mirror.mirror import Mirror
from farandole.train.run import Run

_GRADIENTS_ONLY = ("allreduce", "lagged")  # these never change a weight


class KerasTraining:
    """All ranks call every method together."""

    def __init__(self, run: Run, strategy: Strategy, model: Any, weights: Weights) -> None:
        self.run = run
        self.model = model
        self._weights = weights
        self._optimizer = model.optimizer
        self._changes_weights = strategy.name not in _GRADIENTS_ONLY
        self._mirror = Mirror(
            run,
            strategy,
            tensors(weights.trained),
            frozen=tensors(weights.frozen),
            statistics=tensors(weights.statistics),
            slots=tensors(weights.slots),
            rate=self._rate(),
        )
        self._give()
        self._mirror.follow_checkpoints(self._fetch, self._give)

    def average_gradients(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        self._require_same_model()
        return self._mirror.gradients(grads)

    def begin_epoch(self, epoch: int, epochs: int, steps: int | None) -> None:
        self._require_same_model()
        everyone = self.run.group.gather_json(steps)
        if len(set(everyone)) > 1:
            raise UserError(
                f"the ranks have {everyone} steps in epoch {epoch}, and must take as many each. "
                "Give each an equal share: fd.keras.shard(…)."
            )
        self.run.other_loop.begin_epoch(epoch, epochs)

    def begin_step(self, samples: int, step: int, steps: int | None) -> None:
        self.run.other_loop.batch(samples, step, steps)
        if self._mirror.moved:  # the strategy has entered a new phase
            self._give()

    def end_step(self, logs: Mapping[str, Any]) -> None:
        if not self._changes_weights:
            self._mirror.stepped()
            return
        if "loss" in logs:
            self.run.observe_loss(float(logs["loss"]))
        values = self._weights.values()  # first: with JAX, the rate is there after it too
        self._mirror.optimizer.set_rate(self._rate())
        self._mirror.step(values, self._weights.slot_values())
        if self._mirror.moved:
            self._give()

    def end_epoch(self) -> None:
        """The ranks meet: what is evaluated and saved is one model."""
        self._fetch()
        self.run.other_loop.end_epoch()
        self._mirror.average_statistics(self.run.group)
        self._give()

    def mean_of(self, logs: Any) -> Any:
        """Numbers, in a dict or a list or alone, averaged over all ranks."""
        if logs is None or self.run.size == 1:
            return logs
        if isinstance(logs, dict):
            return dict(zip(logs, self.mean_of(list(logs.values())), strict=True))
        if not isinstance(logs, (list, tuple)):
            return self.mean_of([logs])[0]
        return self.run.mean(torch.tensor([float(v) for v in logs], dtype=torch.float64)).tolist()

    def _fetch(self) -> None:
        self._mirror.load(self._weights.values(), self._weights.slot_values())

    def _give(self) -> None:
        self._weights.assign(self._mirror.values(), self._mirror.slots())

    def _rate(self) -> float:
        return float(self._optimizer.learning_rate)

    def _require_same_model(self) -> None:
        if self.model.optimizer is not self._optimizer:
            raise UserError(
                "the model was compiled again after fd.keras.distribute, and its new optimizer is "
                "not kept in step. Compile it once, before distribute."
            )
        trained = [variable.path for variable in self.model.trainable_variables]
        if trained != list(self._weights.trained):
            raise UserError(
                "other weights are trained than when the model was given to fd.keras.distribute: "
                f"{sorted(set(trained) ^ set(self._weights.trained))[:3]}. Freeze layers before."
            )

r"""The large-batch recipe: from a rate that works at a small batch to a schedule for a large one.

Averaging the gradients of k workers makes the batch k times larger, and an epoch k times fewer
steps. Goyal et al. (2017) keep the accuracy by making each step k times longer (the linear
scaling rule), and by not doing so at once, while the network still changes rapidly (the gradual
warm-up):

    rate
    peak |        ____
         |      /      \              peak = base_rate * global_batch / base_batch
         |    /          \
    base |  /              \__         decay: step, cosine, polynomial or constant
         +--+------+----------+---- step
            0   warm-up      end

`LargeBatch` is the recipe, which depends on neither the optimizer nor the number of workers;
`RateCurve` is the recipe at one global batch, a pure function of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType

import torch

from farandole.errors import UserError, nearest
from farandole.optim.decay import Decay, as_decay
from farandole.optim.scheduler import RateScheduler

# The rate grows with this power of the batch.
RULE_EXPONENTS: Mapping[str, float] = MappingProxyType({"linear": 1.0, "sqrt": 0.5, "none": 0.0})


@dataclass(frozen=True)
class RateCurve:
    """The learning rate at every optimizer step: a straight warm-up, then the decay."""

    start_rate: float
    peak_rate: float
    warmup_steps: int
    total_steps: int
    steps_per_epoch: int
    decay: Decay

    def __call__(self, step: int) -> float:
        """The rate that optimizer step `step` uses; the first is 0. It stays put after the end."""
        if step < 0:
            raise UserError(f"step={step} is before the first step, which is 0.")
        if step < self.warmup_steps:
            return self.start_rate + (self.peak_rate - self.start_rate) * (step / self.warmup_steps)
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        fraction = self.decay.fraction(
            epoch=step / self.steps_per_epoch, progress=min(progress, 1.0)
        )
        return self.peak_rate * fraction


@dataclass(frozen=True)
class LargeBatch:
    """What is known at a small batch, and how to carry it over to a large one.

    `base_rate` is a rate that trains well at a batch of `base_batch` (for ResNet-50: 0.1 at 256).
    `rule` says how the rate grows with the batch: `linear`, `sqrt` (its square root, for
    optimizers that normalise the gradient, such as Adam) or `none`. `decay` is a `Decay` or the
    name of one: `step`, `cosine`, `polynomial`, `constant`.
    """

    base_rate: float
    base_batch: int
    warmup_epochs: float = 5
    decay: str | Decay = "cosine"
    rule: str = "linear"

    def __post_init__(self) -> None:
        _require_positive("base_rate", self.base_rate)
        _require_count("base_batch", self.base_batch)
        if not 0 <= self.warmup_epochs < math.inf:
            raise UserError(
                f"warmup_epochs={self.warmup_epochs!r} must be a number of epochs, 0 for none."
            )
        as_decay(self.decay)
        if self.rule not in RULE_EXPONENTS:
            hint = nearest(str(self.rule), RULE_EXPONENTS)
            raise UserError(f"Unknown rule {self.rule!r}. {hint}")

    def rate(self, global_batch: int) -> float:
        """The peak rate at a batch of `global_batch` samples over all workers."""
        _require_count("global_batch", global_batch)
        times_larger = global_batch / self.base_batch
        return self.base_rate * math.pow(times_larger, RULE_EXPONENTS[self.rule])

    def schedule(self, global_batch: int, steps_per_epoch: int, epochs: float) -> RateCurve:
        """The rate as a pure function of the optimizer step.

        The warm-up starts at `base_rate` and never goes down. Where the scaled rate is no higher
        (a global batch of `base_batch` or less) there is nothing to climb to, and the scaled rate
        is held during the warm-up epochs: the decay then begins at the same epoch at every batch,
        so runs at different numbers of workers remain comparable.
        """
        peak_rate = self.rate(global_batch)
        _require_count("steps_per_epoch", steps_per_epoch)
        _require_positive("epochs", epochs)
        warmup_steps = round(self.warmup_epochs * steps_per_epoch)
        total_steps = round(epochs * steps_per_epoch)
        if warmup_steps >= total_steps:
            raise UserError(
                f"warmup_epochs={self.warmup_epochs:g} leaves nothing of a training of "
                f"{epochs:g} epochs ({total_steps} steps). Train for longer or shorten the "
                "warm-up, for instance to a tenth of the epochs."
            )
        decay = as_decay(self.decay)
        decay.check(warmup_epochs=self.warmup_epochs, epochs=epochs)
        return RateCurve(
            start_rate=min(self.base_rate, peak_rate),
            peak_rate=peak_rate,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            decay=decay,
        )

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        steps_per_epoch: int,
        epochs: float,
        rate_absorbed_by: str | None = None,
    ) -> RateScheduler:
        """Put `optimizer` under this recipe; call the result's `step()` after each of its steps.

        `steps_per_epoch` counts optimizer steps, so with gradient accumulation it is smaller than
        the number of batches read. Parameter groups with different rates keep their ratios: see
        `RateScheduler`. `rate_absorbed_by` is for optimizers whose momentum buffer contains the
        rate, which torch's do not: see `farandole.optim.momentum`.
        """
        return RateScheduler(
            optimizer,
            self.schedule(global_batch, steps_per_epoch, epochs),
            base_rate=self.base_rate,
            steps_per_epoch=steps_per_epoch,
            rate_absorbed_by=rate_absorbed_by,
        )


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{name}={value!r} must be a number above 0.")


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or int(value) < 1:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1.")

"""What becomes of the learning rate after the warm-up: four ways to lower it.

A decay answers one question: which fraction of the peak rate is left? It is asked with the epoch
(for milestones, which are given in epochs) and with the progress from the end of the warm-up (0)
to the end of training (1). Decays know neither the rate nor the batch, so one decay describes
the same training at any number of workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from farandole.errors import UserError, nearest


class Decay(ABC):
    """The shape of the rate after the warm-up."""

    @abstractmethod
    def fraction(self, *, epoch: float, progress: float) -> float:
        """The fraction of the peak rate left; 1 at `progress` 0."""

    def check(self, *, warmup_epochs: float, epochs: float) -> None:  # noqa: B027
        """Raise `UserError` when this decay makes no sense for a training of this length."""


@dataclass(frozen=True)
class ConstantDecay(Decay):
    """The peak rate to the end."""

    def fraction(self, *, epoch: float, progress: float) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(Decay):
    """Multiply the rate by `factor` at each milestone, an epoch counted from the first step.

    The defaults are those of Goyal et al. for 90 epochs of ImageNet.
    """

    milestones: tuple[float, ...] = (30, 60, 80)
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not self.milestones or list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(
                f"milestones={self.milestones!r} must be one or more epochs in rising order, "
                "for instance milestones=(30, 60, 80)."
            )
        if not 0 < self.factor < 1:
            raise UserError(
                f"factor={self.factor!r} must lie between 0 and 1: each milestone multiplies the "
                "rate by it. Use ConstantDecay() for no decay."
            )

    def fraction(self, *, epoch: float, progress: float) -> float:
        return float(self.factor ** sum(epoch >= milestone for milestone in self.milestones))

    def check(self, *, warmup_epochs: float, epochs: float) -> None:
        if self.milestones[0] <= warmup_epochs or self.milestones[-1] >= epochs:
            raise UserError(
                f"milestones={self.milestones!r} must all come after the warm-up (epoch "
                f"{warmup_epochs:g}) and before the end of training (epoch {epochs:g}). "
                "Pass decay=StepDecay(milestones=(...)) or decay='cosine', which needs none."
            )


@dataclass(frozen=True)
class CosineDecay(Decay):
    """Half a cosine wave, from the peak rate down to 0 at the end of training."""

    def fraction(self, *, epoch: float, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class PolynomialDecay(Decay):
    """`(1 - progress) ** power`, down to 0 at the end; power 2 is what You et al. ran LARS with."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.power < math.inf:
            raise UserError(f"power={self.power!r} must be above 0; LARS was published with 2.")

    def fraction(self, *, epoch: float, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


def as_decay(decay: str | Decay) -> Decay:
    """The decay itself, or the one a name stands for, with its default settings."""
    if isinstance(decay, Decay):
        return decay
    named: dict[str, type[Decay]] = {
        "constant": ConstantDecay,
        "cosine": CosineDecay,
        "polynomial": PolynomialDecay,
        "step": StepDecay,
    }
    if decay not in named:
        raise UserError(f"Unknown decay {decay!r}. {nearest(str(decay), named)}")
    return named[decay]()

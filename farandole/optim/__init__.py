"""Optimisation at scale: keep the accuracy of a small batch when many workers make a large one.

The call to start from is `LargeBatch(base_rate, base_batch).apply(optimizer, ...)`: it scales the
rate with the global batch, warms up to it and decays it again. `Lars` is for batches so large
that one rate for all layers no longer works.
"""

from __future__ import annotations

from farandole.optim.decay import ConstantDecay, CosineDecay, Decay, PolynomialDecay, StepDecay
from farandole.optim.lars import Lars
from farandole.optim.momentum import rescale_momentum
from farandole.optim.recipe import LargeBatch, RateCurve
from farandole.optim.scheduler import RateScheduler

__all__ = [
    "ConstantDecay",
    "CosineDecay",
    "Decay",
    "LargeBatch",
    "Lars",
    "PolynomialDecay",
    "RateCurve",
    "RateScheduler",
    "StepDecay",
    "rescale_momentum",
]

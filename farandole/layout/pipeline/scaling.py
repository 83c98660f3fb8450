"""Losses scaled up so that half-precision gradients do not vanish, over all stages of a pipeline.

As torch's `GradScaler`, which knows one device only: here a gradient that is not finite on one
stage makes all stages skip the update, and all of them change the scale alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm import Group
from farandole.comm.tensors import is_finite

_GROWTH_STEPS = 2000


class LossScale:
    """Halves when gradients overflow, doubles when they have not for a long time."""

    def __init__(self, group: Group, start: float = 2.0**16) -> None:
        self._group = group
        self.value = start
        self._steps = 0  # since it last changed

    def unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """*Together*, all stages. Divides by the scale; says whether the update may happen."""
        overflow = torch.tensor(0.0 if all(map(is_finite, gradients)) else 1.0)
        # Before any stage changes anything: if one skips its update, all do. Otherwise the stages
        # would hold weights of different steps.
        self._group.all_reduce(overflow, "max")
        if overflow:
            self.value, self._steps = max(1.0, self.value / 2), 0
            return False
        if gradients:
            torch._foreach_div_(list(gradients), self.value)
        self._steps += 1
        if self._steps == _GROWTH_STEPS:
            self.value, self._steps = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "steps": self._steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._steps = state["value"], int(state["steps"])

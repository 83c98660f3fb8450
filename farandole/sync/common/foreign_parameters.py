"""Parameters that an optimizer steps and no distributed model holds.

Strategies follow models. A loss with weights of its own, say, whose parameters a script has handed
to the optimizer of its model, would be another one on every rank after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.errors import UserError


class ForeignParameters:
    """Those of one optimizer. `models` are the distributed ones of now."""

    def __init__(self, optimizer: Optimizer, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._optimizer = optimizer
        self._models = models
        self._count = -1  # of the optimizer's parameters, when they were last looked through
        self._found: list[torch.Tensor] = []

    def refuse(self) -> None:
        """Before a step: raises `UserError` if it would apply a gradient of such a parameter."""
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count != self._count:
            self._found, self._count = self._find(), count
        if all(parameter.grad is None for parameter in self._found):
            return
        self._found = self._find()  # another model may have been distributed since
        trained = [parameter for parameter in self._found if parameter.grad is not None]
        if trained:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in trained[:3])
            raise UserError(
                f"the optimizer steps {len(trained)} parameter(s) of no distributed model (of "
                f"shape {shapes}{', …' * (len(trained) > 3)}), and each rank would train its own. "
                "Give the nn.Module that holds them to run.distribute too, or make them a part of "
                "the model before it is distributed."
            )

    def _find(self) -> list[torch.Tensor]:
        held = {parameter for model in self._models() for parameter in model.parameters()}
        groups = self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if p not in held]

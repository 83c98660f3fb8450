"""Where a pipeline's gradients enter a strategy.

Strategies keep replicas in step by hooks in a backward pass and by the optimizer's step. A stage of
a pipeline has many backward passes in a step, and a strategy must see one. So when all are done,
the added-up gradients go through one more backward pass, in which nothing is computed: that of a
function whose gradients are known.

    stage      B0 B1 B2 B3 ─▶ gradients, added up
    bridge                      ╰─▶ forward: 0 ─▶ backward: these gradients ─▶ hooks, optimizer

A strategy sees an ordinary module with an ordinary step and does not have to know about pipelines.
A weight without a gradient has none there either, and strategies handle that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from farandole.layout.partition.stage_module import StageModule


class GradientBridge(nn.Module):
    """Everything that a rank holds, as one module. Calling it is one step's forward pass.

    `spare`: what belongs to the model and no stage uses. It is kept for checkpoints alone.
    """

    def __init__(
        self, parts: Mapping[int, StageModule], spare: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(stage): part for stage, part in parts.items()})
        for number, tensor in enumerate(spare):
            self.register_buffer(f"spare{number}", tensor)
        if not self.trained():
            # Optimizers and strategies refuse to do nothing; so there is something to do.
            self.nothing = nn.Parameter(torch.zeros(1))

    def trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.parameters() if weight.requires_grad]

    def forward(self) -> torch.Tensor:
        """Takes the gradients away from the weights; the backward of the result gives them back."""
        trained = self.trained()
        # Invariant: every rank has exactly one pass a step. A pass without any gradient is none
        # that a strategy would see, and the other replicas would wait in their all-reduce.
        weights = [weight for weight in trained if weight.grad is not None] or trained[:1]
        gradients = []
        for weight in weights:
            gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            weight.grad = None
        result: torch.Tensor = KnownGradients.apply(gradients, *weights)
        return result

    def exchange(self) -> None:
        """One step's forward and backward pass."""
        weights = self.trained()
        absent = all(weight.grad is None for weight in weights)
        self().backward()
        if absent and weights[0].grad is not None and not weights[0].grad.any():
            weights[0].grad = None  # nobody has added to what stood for nothing


class KnownGradients(torch.autograd.Function):
    """Zero, with gradients that are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        # The gradients are given away, not copied: autograd may take them as `weight.grad`.
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients

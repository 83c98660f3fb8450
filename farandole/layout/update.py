"""A step's end on one rank: gradients are made whole, go through the strategy, and change weights.

1. ranks that hold the same stage add up            GEMS's two directions; replicas of a stage
2. ranks that hold the same tied weight add up      an embedding that is the last layer too
3. the gate: the strategy                           replicas of the whole pipeline
4. unscaling; the norm over all stages, and clipping
5. the optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.layout.deferred import commit_statistics, share_statistics
from farandole.layout.gate import Gate
from farandole.layout.scaling import LossScale
from farandole.layout.sums import sum_over


class Tie(NamedTuple):
    """Weights that the ranks of a group hold alike, because the model uses them in two stages.

    Where several ranks hold the same stage, each has the whole gradient of it, and gives a share.
    """

    group: Group
    weights: list[nn.Parameter]
    share: float


class Ends(NamedTuple):
    """What a rank's updates have to do with other ranks of its pipeline."""

    pipe: Group
    holders: Group | None  # the ranks that hold the same stages as this one, if there are any
    ties: list[Tie]
    counted: list[nn.Parameter]  # so that all ranks together count every weight once


class Update:
    """What a `U` of the schedule does. `averages`: gradients of whole batches are added up."""

    def __init__(
        self,
        gate: Gate,
        ends: Ends,
        *,
        averages: bool = False,
        clip: float | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._gate = gate
        self._ends = ends
        self._averages = averages
        self._clip = clip
        self._scale = scale
        self._exchange: Callable[[], None] | None = None
        self._optimizer: Optimizer | None = None

    def connect(self, exchange: Callable[[], None] | None, optimizer: Optimizer) -> None:
        """`exchange` takes the gradients through the gate and a strategy, if there is one."""
        self._exchange, self._optimizer = exchange, optimizer

    def __call__(self, batches_here: int = 1) -> None:
        """Makes a new version of the weights, from what was added up since the last."""
        trained = self._gate.trained()
        self._add_up(trained, batches_here)
        if self._exchange is not None:
            self._exchange()
        gradients = [_gradient(weight) for weight in trained]
        goes_on = self._scale is None or self._scale.unscale(gradients)
        if goes_on and self._clip is not None:
            self._clip_to(self._clip, gradients)
        if goes_on and self._optimizer is not None:
            self._optimizer.step()
        for weight in trained:
            weight.grad = None
        if self._ends.holders is not None:
            share_statistics(self._gate, self._ends.holders)
        commit_statistics(self._gate)

    def add_up(self) -> None:
        """Steps 1 and 2 alone: gradients of one batch become those of the whole replica."""
        self._add_up(self._gate.trained(), 0)

    def _add_up(self, trained: Sequence[nn.Parameter], batches_here: int) -> None:
        if self._ends.holders is not None:
            gradients = [_gradient(weight) for weight in trained]
            count = torch.tensor(float(batches_here))
            sum_over(self._ends.holders, [*gradients, count])
            if self._averages and count > 1:
                torch._foreach_div_(gradients, count.item())
        for tie in self._ends.ties:
            gradients = [_gradient(weight) for weight in tie.weights]
            torch._foreach_mul_(gradients, tie.share)
            sum_over(tie.group, gradients)

    def sum_over_holders(self, value: torch.Tensor) -> torch.Tensor:
        """Of the ranks that hold the same stages as this one."""
        return value if self._ends.holders is None else self._ends.holders.all_reduce(value)

    def _clip_to(self, most: float, gradients: Sequence[torch.Tensor]) -> None:
        mine = [_gradient(weight) for weight in self._ends.counted]
        norms = torch._foreach_norm(mine) if mine else []
        square = sum(float(norm) ** 2 for norm in norms)
        total = self._ends.pipe.all_reduce(torch.tensor(square, dtype=torch.float64))
        norm = math.sqrt(total)
        if norm > most:
            torch._foreach_mul_(list(gradients), most / (norm + 1e-6))


def _gradient(weight: nn.Parameter) -> torch.Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad

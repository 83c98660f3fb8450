"""A step's end on one rank: gradients are made whole, go through the strategy, and change weights.

1. ranks that hold the same stage add up            GEMS's two directions; replicas of a stage
2. ranks that hold the same tied weight add up      an embedding that is the last layer too
3. the gradient bridge: the strategy                           replicas of the whole pipeline
4. unscaling
5. hooks that the user has set on weights           see `weight_hooks`
6. the norm over all stages, and clipping
7. the optimizer; running statistics move

All but the last is `prepare`, which needs other ranks and changes no weight. A weight that no
micro-batch has used has no gradient, as in the plain model: momentum and decay leave it alone.
Ranks that add up tell each other, beside the gradients, which weights have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.layout.pipeline.deferred import commit_statistics, share_statistics
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.scaling import LossScale
from farandole.layout.pipeline.sums import sum_over
from farandole.layout.pipeline.weight_hooks import WeightHooks


class Tie(NamedTuple):
    """Weights that the ranks of a group hold alike, because the model uses them in two stages.

    Where several ranks hold the same stage, each has the whole gradient of it, and gives a share.
    """

    group: Group
    weights: list[nn.Parameter]
    share: float


class GradientGroups(NamedTuple):
    """What a rank's updates have to do with other ranks of its pipeline."""

    pipe: Group
    holders: Group | None  # the ranks that hold the same stages as this one, if there are any
    ties: list[Tie]
    counted: list[nn.Parameter]  # so that all ranks together count every weight once


class Update:
    """What a `U` of the schedule does. `averages`: gradients of whole batches are added up."""

    def __init__(
        self,
        bridge: GradientBridge,
        groups: GradientGroups,
        hooks: WeightHooks,
        *,
        averages: bool = False,
        clip: float | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._bridge = bridge
        self._groups = groups
        self.hooks = hooks
        self._averages = averages
        self._clip = clip
        self._scale = scale
        self._exchange: Callable[[], None] | None = None
        self._optimizer: Optimizer | None = None
        self._goes_on = False  # the gradients that are prepared are finite

    def connect(self, exchange: Callable[[], None] | None, optimizer: Optimizer) -> None:
        """`exchange` takes the gradients through the gradient bridge and a strategy, if there is
        one."""
        self._exchange, self._optimizer = exchange, optimizer

    def __call__(self, batches_here: int = 1) -> None:
        """Makes a new version of the weights, from what was added up since the last."""
        self.prepare(batches_here)
        self.apply()

    def prepare(self, batches_here: int = 1) -> None:
        """All that needs other ranks. Leaves weights and running statistics as they are."""
        trained = self._bridge.trained()
        self.hooks.refuse_new()
        self._add_up(trained, batches_here)
        if self._exchange is not None:
            self._exchange()
        # The same on all ranks of the pipeline, since `unscale` asks all stages. So all of them
        # take part in the norm below and update, or none does.
        goes_on = self._scale is None or self._scale.unscale(_gradients(trained))
        if goes_on:
            self.hooks.run()
        gradients = _gradients(trained)
        if goes_on and self._clip is not None:
            self._clip_to(self._clip, gradients)
        if self._groups.holders is not None:
            share_statistics(self._bridge, self._groups.holders)
        self._goes_on = goes_on

    def apply(self) -> None:
        """After `prepare`. Waits for nobody."""
        if self._goes_on and self._optimizer is not None:
            self._optimizer.step()
        for weight in self._bridge.trained():
            weight.grad = None
        commit_statistics(self._bridge)

    def add_up(self) -> None:
        """Steps 1 and 2 alone: gradients of one batch become those of the whole replica."""
        self._add_up(self._bridge.trained(), 0)

    def _add_up(self, trained: Sequence[nn.Parameter], batches_here: int) -> None:
        if self._groups.holders is not None:
            count = _sum_of_gradients(self._groups.holders, trained, float(batches_here))
            # In a stream, an update may hold several whole batches, on several ranks. Their
            # gradients are averaged, so that the step has the size of one batch's.
            if self._averages and count > 1:
                torch._foreach_div_(_gradients(trained), count)
        for tie in self._groups.ties:
            # After step 1 each of the ranks that hold a stage has the whole gradient of it, and all
            # of them are in the group of the tie. Each gives its share, or the gradient would count
            # several times.
            if own := _gradients(tie.weights):
                torch._foreach_mul_(own, tie.share)
            _sum_of_gradients(tie.group, tie.weights)

    def sum_over_holders(self, value: torch.Tensor) -> torch.Tensor:
        """Of the ranks that hold the same stages as this one."""
        return value if self._groups.holders is None else self._groups.holders.all_reduce(value)

    def _clip_to(self, most: float, gradients: Sequence[torch.Tensor]) -> None:
        mine = _gradients(self._groups.counted)
        norms = torch._foreach_norm(mine) if mine else []
        square = sum(float(norm) ** 2 for norm in norms)
        total = self._groups.pipe.all_reduce(torch.tensor(square, dtype=torch.float64))
        # The same number on all ranks, so all stages are scaled by the same factor.
        norm = math.sqrt(total)
        if norm > most and gradients:
            torch._foreach_mul_(list(gradients), most / (norm + 1e-6))


def _gradients(weights: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Of those that have one."""
    return [weight.grad for weight in weights if weight.grad is not None]


def _sum_of_gradients(group: Group, weights: Sequence[nn.Parameter], number: float = 0.0) -> float:
    """Adds up, in place; a weight has a gradient afterwards if it has one on any rank. A number of
    each rank travels along; returns the sum of them."""
    # Ranks of a group must reduce the same tensors, also where one of them has not used a weight:
    # it sends zeros. A weight that nobody has used keeps no gradient, or momentum and weight decay
    # would move it.
    flags = torch.tensor([number, *(float(weight.grad is not None) for weight in weights)])
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
    ]
    sum_over(group, [*gradients, flags])
    total, *present = flags.tolist()
    for weight, gradient, anywhere in zip(weights, gradients, present, strict=True):
        weight.grad = gradient if anywhere else None
    return float(total)

"""Weighs each rank's batch by its number of samples.

A rank's batch may be larger or smaller than the average batch, mostly at the end of an epoch. The
weight scales what a backward pass adds to each parameter's gradient, at the moment of adding. So it
is exact when gradients of several batches accumulate, and `torch.autograd.grad`, which adds
nothing, returns gradients unscaled. Layers that sum over ranks in the backward pass, such as a
shared BatchNorm, must apply the other ranks' weights themselves.

At the end of an epoch several ranks may have read the same samples, which count once. Such layers
must divide by the number of readers in the forward pass too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from farandole.sync.common.frozen import accumulator, can_be_trained

_WEIGHED = "farandole: weighed"


class Weighing:
    """Scales the gradients of a model's parameters by the weight of the batch."""

    def __init__(self, model: nn.Module) -> None:
        self.is_on = True
        self._model = model
        self._weight = 1.0
        self.readers = 1  # of each sample of the batch
        self._nodes: list[Any] = []  # held, because torch only looks at those that are still there
        self._hooks: list[RemovableHandle] = []

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        """Sets the weight. At 1, which nearly all batches have, there are no hooks and no cost."""
        if weight == self._weight:
            return
        self._weight = weight
        for node, hook in zip(self._nodes, self._hooks, strict=True):
            hook.remove()
            del node.metadata[_WEIGHED]
        self._hooks, self._nodes = [], []
        if weight == 1.0:
            return
        # Of frozen ones too: a script may thaw them before it computes the gradients of this batch.
        for parameter in filter(can_be_trained, self._model.parameters()):
            node = accumulator(parameter)
            if _WEIGHED in node.metadata:
                continue  # by another distributed model, which holds this parameter too
            node.metadata[_WEIGHED] = True
            self._nodes.append(node)
            self._hooks.append(node.register_prehook(self._scaled))

    def _scaled(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple([g * self._weight for g in gradients]) if self.is_on else gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> Weighing:
        """The same object: a copy of a layer that knows the weight belongs to the same run."""
        return self

"""Weights of several ages on one rank, for schemes in which updates come before all backwards.

    version    0 ───────────▶ 1 ───────────▶ 2            PipeDream, first of three stages
    forward    F0  F1  F2         F3             F4
    backward              B0 U        B1 U            B2 …
                          uses 0      uses 0          uses 0, then B3 uses 1, …

A backward must use the weights of its forward. Optimizers change weights in place, and PyTorch
refuses a backward through weights that were changed. So each forward runs functionally over a copy
of its version, which lives as long as somebody needs it; its gradients are moved to the weights
themselves. A rank that never needs two versions at once uses the weights themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from farandole.layout.partition.stage_module import PassId, StageModule
from farandole.layout.pipeline.memory import storages_of


class Weights:
    """The only version: the weights themselves."""

    def __init__(self, module: StageModule) -> None:
        self.module = module

    def begin(self, version: int) -> None:
        """A micro-batch begins with this version; it may be run twice, and is `done` once."""

    def run(self, value: Any, pass_id: PassId | None, version: int) -> Any:
        """A forward pass."""
        return self.module(value, pass_id)

    def done(self, version: int) -> None:
        """A backward pass with this version has ended."""

    def updated(self, version: int) -> None:
        """The weights are now this version; after a drain they are version 0 again."""

    def storages(self, version: int) -> set[int]:
        """Where the weights of a forward with this version lie."""
        return storages_of(list(self.module.parameters()))


class Stash(Weights):
    """A copy of every version that is still needed.

    `behind`: forwards begin with a version that is up to so many updates old.
    """

    def __init__(self, module: StageModule, behind: int) -> None:
        super().__init__(module)
        self._behind = behind
        self._newest = 0
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._pending: Counter[int] = Counter()

    def begin(self, version: int) -> None:
        self._pending[version] += 1

    def run(self, value: Any, pass_id: PassId | None, version: int) -> Any:
        # Buffers are not among the copies: their state is that of the stage, whatever the version.
        return functional_call(self.module, self._copy(version), (value, pass_id))

    def done(self, version: int) -> None:
        self._pending[version] -= 1
        # Backwards of several versions add to one gradient. Invariant: when an update reads
        # `weight.grad`, it has every backward since the last update, and the copies have none.
        for name, weight in self.module.named_parameters():
            leaf = self._copies[version][name]
            if leaf.grad is None:
                continue
            weight.grad = leaf.grad if weight.grad is None else weight.grad.add_(leaf.grad)
            leaf.grad = None
        self._forget()

    def updated(self, version: int) -> None:
        self._newest = version
        if version == 0:  # all is drained
            self._copies.clear()
            self._pending.clear()
        elif self._behind:  # somebody will begin with it when it is no longer the newest
            self._copy(version)
        self._forget()

    def storages(self, version: int) -> set[int]:
        return storages_of(list(self._copy(version).values()))

    def _copy(self, version: int) -> dict[str, torch.Tensor]:
        if version not in self._copies:
            assert version == self._newest, "an older version can no longer be copied"
            self._copies[version] = {
                name: weight.detach().clone().requires_grad_(weight.requires_grad)
                for name, weight in self.module.named_parameters()
            }
        return self._copies[version]

    def _forget(self) -> None:
        for version in list(self._copies):
            # Invariant: a copy lives while a forward may still begin with it (`behind`) or a
            # backward must still use it (`_pending`). Without the first test a copy that nobody
            # uses now would go, and the weights have moved on: it could not be made again.
            if version < self._newest - self._behind and not self._pending[version]:
                del self._copies[version]


class Latest(Weights):
    """Without a stash: a backward uses whatever the weights are by then, as PipeDream would without
    its stash. The gradient is then of no function; it is here to be compared with.

    What autograd keeps of a weight is only where it lies; in the backward that is looked up.
    """

    def run(self, value: Any, pass_id: PassId | None, version: int) -> Any:
        weights = {
            weight.untyped_storage().data_ptr(): weight for weight in self.module.parameters()
        }

        def keep(tensor: torch.Tensor) -> torch.Tensor | _Place:
            # Views of a weight, such as its transpose, lie in its storage too. A cast copy does
            # not, and is kept as it is.
            weight = weights.get(tensor.untyped_storage().data_ptr())
            if weight is None or tensor.dtype != weight.dtype:
                return tensor
            return _Place(weight, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with torch.autograd.graph.saved_tensors_hooks(keep, _look_up):
            return self.module(value, pass_id)


class _Place(NamedTuple):
    weight: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _look_up(kept: torch.Tensor | _Place) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.weight.detach().as_strided(kept.size, kept.stride, kept.offset)

"""Optimizers that train a distributed model, and were not given to `run.distribute` with it.

Training is right with them where models are kept in step, but a checkpoint has no state of them: a
resumed run would begin with the moments of nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

_PARTS = {"state", "param_groups"}  # of every optimizer's `state_dict`


class OtherOptimizers:
    """Those of one run. `models` are the distributed ones of now, `given` their optimizers."""

    def __init__(
        self,
        models: Callable[[], Iterable[nn.Module]],
        given: Callable[[], Iterable[Optimizer | None]],
    ) -> None:
        self._models = models
        self._given = given
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None

    def look_again(self) -> None:
        """A model has been distributed: whoever steps from now on may train it."""
        self._seen.clear()
        if self._handle is not None:
            return
        me = weakref.ref(self)  # a hook of all optimizers would keep a run for ever

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            others = me()
            if others is not None and optimizer not in others._seen:
                others._look_at(optimizer)

        self._handle = register_optimizer_step_post_hook(torch.compiler.disable(stepped))

    def without_a_place_in(self, state: Mapping[str, Any]) -> list[str]:
        """Kinds of those that have a state, unless the script's own `state` holds as many."""
        given = list(self._given())
        others = [
            type(optimizer).__name__
            for optimizer in self._found
            if optimizer.state and not any(optimizer is known for known in given)
        ]
        return sorted(others) if _count_states(state) < len(others) else []

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look_at(self, optimizer: Optimizer) -> None:
        self._seen.add(optimizer)
        held = {parameter for model in self._models() for parameter in model.parameters()}
        if any(p in held for group in optimizer.param_groups for p in group["params"]):
            self._found.add(optimizer)


def _count_states(value: Any) -> int:
    """Of optimizers, however deep."""
    if isinstance(value, Mapping):
        return 1 if set(value) >= _PARTS else sum(map(_count_states, value.values()))
    return sum(map(_count_states, value)) if isinstance(value, (list, tuple)) else 0

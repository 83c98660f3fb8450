"""An optimizer whose steps are taken elsewhere.

Strategies act before and after a step, by hooks. Torch calls both around one function; here another
framework takes the step between two calls, so the hooks are kept apart.

    gradients ─▶ before(): hooks ─▶ the other framework's update ─▶ after(): hooks ─▶ weights
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class MirrorOptimizer(Optimizer):
    """`slots`: what the other framework's optimizer remembers, such as momentum, by name.

    The state of the first parameter holds them, so they are saved, spread and averaged.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], slots: Mapping[str, torch.Tensor], rate: float
    ) -> None:
        self._before: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        super().__init__(parameters, {"lr": rate})
        self._home: nn.Parameter = self.param_groups[0]["params"][0]
        for name, value in slots.items():
            self.state[self._home][name] = value.detach().clone()

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        return dict(self.state.get(self._home, {}))

    def set_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return _keep(self._before, hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return _keep(self._after, hook)

    def before(self) -> None:
        """The gradients are there, and no weight has changed."""
        for hook in list(self._before.values()):
            hook(self, (self,), {})

    def after(self) -> None:
        """The step was taken, and the weights are here."""
        for hook in list(self._after.values()):
            hook(self, (self,), {})

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("the steps of a mirrored model are taken by its own framework")


def _keep(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

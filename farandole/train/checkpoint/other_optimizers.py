"""Optimizers that train a distributed model, and were not given to `run.distribute` with it.

Training is right with them where models are kept in step, but a checkpoint has no state of them: a
resumed run would begin with the moments of nobody. Parameter servers hold what the given optimizer
trains and no more: there they are refused.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.errors import UserError

_PARTS = {"state", "param_groups"}  # of every optimizer's `state_dict`
_DEPTH = 5


class OtherOptimizers:
    """Those of one run. `models` are the distributed ones of now, `given` their optimizers."""

    def __init__(
        self,
        models: Callable[[], Iterable[nn.Module]],
        given: Callable[[], Iterable[Optimizer | None]],
    ) -> None:
        self._models = models
        self._given = given
        self._on_servers: list[nn.Module] = []
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def look_again(self) -> None:
        """A model has been distributed: whoever steps from now on may train it."""
        self._seen.clear()
        _STEPS.watch(self)

    def refuse_for(self, model: nn.Module) -> None:
        """Servers hold it."""
        self._on_servers.append(model)

    def stepped(self, optimizer: Optimizer) -> None:
        """Raises `UserError` if it has trained what servers should hold and do not."""
        if optimizer in self._seen:
            return
        given = [known for known in self._given() if known is not None]
        if any(optimizer is known for known in given):
            self._seen.add(optimizer)
            return
        moved = {
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        if moved:
            self._seen.add(optimizer)
        held = {p for known in given for group in known.param_groups for p in group["params"]}
        for model in self._on_servers:
            for name, parameter in model.named_parameters():
                if parameter in moved and parameter not in held:
                    raise UserError(
                        f"{name!r} is trained by {type(optimizer).__name__}, which run.distribute "
                        "was not given: the servers do not hold it, and each rank would train its "
                        "own. Give all that is trained to one optimizer, as groups of parameters, "
                        "or take a strategy that leaves the model with the workers, such as "
                        "allreduce or local."
                    )
        if any(p in moved for model in self._models() for p in model.parameters()):
            self._found.add(optimizer)

    def without_a_place_in(self, state: Mapping[str, Any]) -> list[str]:
        """Kinds of those that have a state, unless the script's own `state` holds as many."""
        given = [known for known in self._given() if known is not None]
        others = [
            type(optimizer).__name__
            for optimizer in self._found
            if optimizer.state and not any(_are_one(optimizer, known) for known in given)
        ]
        return sorted(others) if _count_states(state) < len(others) else []

    def close(self) -> None:
        _STEPS.leave(self)


class _Steps:
    """Of all optimizers of this process. PyTorch looks through its own list of hooks in each step,
    and fails if another thread changes that meanwhile: so one hook stays there for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: tuple[weakref.ref[OtherOptimizers], ...] = ()
        self._is_hooked = False

    def watch(self, run: OtherOptimizers) -> None:
        with self._lock:
            if not self._is_hooked:
                self._is_hooked = True
                register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))
            known = [each for each in self._runs if each() not in (None, run)]
            self._runs = (*known, weakref.ref(run))

    def leave(self, run: OtherOptimizers) -> None:
        with self._lock:
            self._runs = tuple(each for each in self._runs if each() not in (None, run))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for each in self._runs:
            run = each()
            if run is not None:
                run.stepped(optimizer)


_STEPS = _Steps()


def _are_one(optimizer: Optimizer, known: Optimizer) -> bool:
    """Also where one is wrapped around the other, as in Lookahead: they share what they hold."""
    shares_groups = optimizer.param_groups is known.param_groups
    return optimizer is known or optimizer.state is known.state or shares_groups


def _count_states(value: Any, depth: int = 0) -> int:
    """Of optimizers, `_DEPTH` containers deep: what holds itself is refused later, with words."""
    if not isinstance(value, (Mapping, list, tuple)) or depth > _DEPTH:
        return 0
    if isinstance(value, Mapping):
        if set(value) >= _PARTS:
            return 1
        value = list(value.values())
    return sum(_count_states(each, depth + 1) for each in value)

"""What the servers do with gradients under `downpour`: which rule, and at which rate.

DistBelief's servers apply Adagrad to the gradients of SGD. An optimizer that scales its steps
itself has a rate of another size: a tenth of Adam's 0.001 under Adagrad would move nothing. There
the servers apply the rule of that optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from farandole.server.rules import Adagrad, rule_of

_SGD_GAIN = 0.1
"""Adagrad's first step moves every parameter by its whole rate, however small the gradient."""


@dataclass(frozen=True)
class ServerStep:
    rule: str
    gain: float  # of the script's rate


def server_step(
    settings: Mapping[str, Any],
    optimizer: Optimizer,
    *,
    push: int,
    workers: int,
    gain: float | None = None,
) -> ServerStep:
    """For one of the optimizer's groups. `gain`: as the script has it, None where it has none.

    Raises `UserError` for an optimizer that the servers have no rule for.
    """
    if isinstance(optimizer, torch.optim.SGD):
        rule = str(
            Adagrad(
                # What is pushed is the sum of so many gradients, each of which has its decay.
                weight_decay=push * float(settings.get("weight_decay", 0)),
                maximize=bool(settings.get("maximize", False)),
            )
        )
        return ServerStep(rule, _SGD_GAIN if gain is None else gain)
    decoupled = settings.get("decoupled_weight_decay", False)
    decay = float(settings.get("weight_decay", 0)) * (1 if decoupled else push)
    summed = {**settings, "weight_decay": decay}
    rule = rule_of(summed, optimizer, instead="--sync server:async,update=worker")
    return ServerStep(rule, _usual_gain(optimizer, push, workers) if gain is None else gain)


def _usual_gain(optimizer: Optimizer, push: int, workers: int) -> float:
    """The workers together push `workers` times in `push` steps, and should come as far as one
    optimizer in as many. Adagrad sees to that itself: the more is pushed, the less it moves."""
    return 1.0 if isinstance(optimizer, torch.optim.Adagrad) else min(1.0, push / workers)

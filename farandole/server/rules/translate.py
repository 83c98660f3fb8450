"""From an optimizer of torch's to the rule that makes the same updates on the server.

The learning rate is no part of a rule: it changes, and travels with every push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from farandole.errors import UserError
from farandole.server.rules.adagrad import Adagrad
from farandole.server.rules.adam import Adam, AdamW
from farandole.server.rules.rule import Rule
from farandole.server.rules.sgd import Sgd

_IMMATERIAL = frozenset(
    # Which parameters, how fast, and what schedulers note down about the rate.
    {"params", "param_names", "name", "lr", "foreach", "fused", "capturable"}
    | {"initial_lr", "max_lr", "min_lr", "swa_lr"}
)


def rule_of(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, instead: str = "update=worker"
) -> str:
    """The text of the rule whose updates equal those of `optimizer` on this one of its groups.

    Raises `UserError` if no rule does what it does; `instead` is what to write then.
    """
    kind = type(optimizer)  # not a subclass: who knows what its step does
    if kind not in _TRANSLATIONS:
        known = ", ".join(sorted(known.__name__ for known in _TRANSLATIONS))
        raise UserError(
            f"the server has no rule for {kind.__module__}.{kind.__qualname__}. It has one for "
            f"torch.optim's {known}. Write {instead}: workers then make the updates, and the "
            "server adds them."
        )
    left = {option: value for option, value in group.items() if option not in _IMMATERIAL}
    rule = _TRANSLATIONS[kind](left)
    if not left.get("differentiable"):
        left.pop("differentiable", None)
    if left:
        options = ", ".join(f"{option}={value}" for option, value in sorted(left.items()))
        raise UserError(
            f"the server's rule {rule.name!r} has nothing like {options} of "
            f"torch.optim.{kind.__name__}. Leave it out, or write {instead}: workers then make the "
            "updates, and the server adds them."
        )
    return str(rule)


# Each takes out of `left` what it has translated.


def _sgd(left: dict[str, Any]) -> Rule:
    return Sgd(
        momentum=float(left.pop("momentum")),
        nesterov=bool(left.pop("nesterov")),
        weight_decay=float(left.pop("weight_decay")),
        dampening=float(left.pop("dampening")),
        maximize=bool(left.pop("maximize")),
    )


def _adagrad(left: dict[str, Any]) -> Rule:
    return Adagrad(
        eps=float(left.pop("eps")),
        initial_sum=float(left.pop("initial_accumulator_value")),
        weight_decay=float(left.pop("weight_decay")),
        rate_decay=float(left.pop("lr_decay")),
        maximize=bool(left.pop("maximize")),
    )


def _adam(left: dict[str, Any]) -> Rule:
    beta1, beta2 = left.pop("betas")
    kind = AdamW if left.pop("decoupled_weight_decay") else Adam
    return kind(
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(left.pop("eps")),
        weight_decay=float(left.pop("weight_decay")),
        amsgrad=bool(left.pop("amsgrad")),
        maximize=bool(left.pop("maximize")),
    )


_TRANSLATIONS: Mapping[type[torch.optim.Optimizer], Callable[[dict[str, Any]], Rule]] = (
    MappingProxyType(
        {
            torch.optim.SGD: _sgd,
            torch.optim.Adagrad: _adagrad,
            torch.optim.Adam: _adam,
            torch.optim.AdamW: _adam,
        }
    )
)

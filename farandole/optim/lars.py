"""LARS: a rate of its own for every layer, for batches where one rate for all no longer works.

The linear scaling rule breaks down where the rate gets so large that in some layer a single step
is longer than the weights themselves. You, Gitman and Ginsburg (2017) bound each layer's step by
a fixed share of the size of its weights. For a layer with weights w and gradient g:

    ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
    u     = momentum * u + ratio * (g + weight_decay * w)
    w     = w - lr * u

The paper multiplies by `lr` inside the momentum buffer. Here it stands outside, as in
`torch.optim.SGD`; that is the paper's update with momentum correction (see
`farandole.optim.momentum`), and the paper's own while the rate is constant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from farandole.errors import UserError


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose steps are scaled layer by layer; a layer is one parameter tensor.

    Parameters of one dimension or none (biases, BatchNorm's scales and shifts) are updated as by
    plain SGD, without ratio and without weight decay, unless `exclude_1d=False`. A layer whose
    weights are all 0 is updated with ratio 1: the formula would keep it at 0 for ever. All
    settings can be given per parameter group.

    The norms are those of the tensors this worker holds. Replicas that average their gradients
    agree on them; a layer whose weights are cut over several workers would not.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; the constructor comes through here too."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for (_, _, is_adapted), params in _alike(group).items():
                self._update(params, group, is_adapted)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any], is_adapted: bool) -> None:
        # The `_foreach_` functions launch one kernel for many tensors instead of one for each.
        grads = [param.grad for param in params if param.grad is not None]
        updates = _scaled(params, grads, group) if is_adapted else grads
        momentum = group["momentum"]
        if momentum > 0:
            buffers = [self._momentum_buffer(param) for param in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                updates = list(torch._foreach_add(updates, buffers, alpha=momentum))
            else:
                updates = buffers
        torch._foreach_add_(params, updates, alpha=-float(group["lr"]))

    def _momentum_buffer(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _alike(group: dict[str, Any]) -> dict[tuple[torch.device, torch.dtype, bool], list[Tensor]]:
    """The parameters with a gradient, by what must agree for them to be updated together."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = defaultdict(list)
    for param in group["params"]:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise UserError(
                f"Lars got a sparse gradient for a parameter of shape {tuple(param.shape)}. Build "
                "the embedding with sparse=False, or give it an optimizer of its own."
            )
        is_adapted = param.ndim > 1 or not group["exclude_1d"]
        alike[param.device, param.dtype, is_adapted].append(param)
    return alike


def _scaled(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """`ratio * (g + weight_decay * w)` for each layer, without waiting for the device."""
    weight_decay = group["weight_decay"]
    # Half precision overflows when squared; norms are worth at least single precision.
    norm_dtype = torch.promote_types(params[0].dtype, torch.float32)
    weight_norms = torch.stack(list(torch._foreach_norm(params, dtype=norm_dtype)))
    grad_norms = torch.stack(list(torch._foreach_norm(grads, dtype=norm_dtype)))
    denominators = grad_norms + weight_decay * weight_norms + group["eps"]
    ratios = torch.where(
        (weight_norms > 0) & (denominators > 0),
        group["trust_coefficient"] * weight_norms / denominators,
        1.0,
    )
    updates = list(torch._foreach_add(grads, params, alpha=weight_decay))
    torch._foreach_mul_(updates, list(ratios.unbind()))
    return updates


def _check_settings(settings: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps"):
        if not settings[name] >= 0:
            raise UserError(f"{name}={settings[name]!r} must be 0 or more.")
    if not settings["trust_coefficient"] > 0:
        raise UserError(
            f"trust_coefficient={settings['trust_coefficient']!r} must be above 0; it was "
            "published with 0.001."
        )
    if not 0 <= settings["momentum"] < 1:
        raise UserError(f"momentum={settings['momentum']!r} must be at least 0 and below 1.")
    if settings["nesterov"] and settings["momentum"] == 0:
        raise UserError("nesterov=True needs momentum; pass momentum=0.9 or leave nesterov out.")

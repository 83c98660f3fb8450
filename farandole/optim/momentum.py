"""Momentum correction: what a change of the learning rate does to the momentum, and the remedy.

SGD with momentum is written in two ways, with momentum m, gradient g_t and rate r_t:

    rate outside                        rate absorbed
    u_t = m u_(t-1) + g_t               v_t = m v_(t-1) + r_t g_t
    w_t = w_(t-1) - r_t u_t             w_t = w_(t-1) - v_t

At a constant rate they are the same, with v = r u. When the rate changes they are not: the
absorbed buffer still holds the past gradients times the *old* rate. After a rise the past then
weighs too little, after a fall too much. Substituting v_t = r_t u_t into the left-hand form gives

    v_t = m (r_t / r_(t-1)) v_(t-1) + r_t g_t

so multiplying the absorbed buffer by new / old at every change restores the left-hand trajectory
exactly. This is the correction of Goyal et al. (2017, section 3).

`torch.optim.SGD` has the rate outside, and so has `Lars`. They need no correction: multiplying
their buffers would introduce the very error that the correction removes. Dampening, weight decay
and Nesterov momentum change what is added to the buffer, or how it is read, but not where the
rate stands, and the result holds for them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.errors import UserError
from farandole.optim.lars import Lars

RATE_OUTSIDE = (torch.optim.SGD, torch.optim.RMSprop, Lars)


def check_rate_is_absorbed(optimizer: torch.optim.Optimizer, buffer_name: str) -> None:
    """Refuse to correct an optimizer that is known to keep the rate outside its buffer."""
    if isinstance(optimizer, RATE_OUTSIDE):
        raise UserError(
            f"{type(optimizer).__name__} multiplies by the rate after its momentum, so "
            f"correcting {buffer_name!r} would be wrong. Leave out rate_absorbed_by: the "
            "trajectory is already the corrected one."
        )


@torch.no_grad()
def rescale_momentum(
    optimizer: torch.optim.Optimizer,
    old_rates: Sequence[float],
    new_rates: Sequence[float],
    buffer_name: str = "momentum_buffer",
) -> None:
    """Multiply each group's absorbed momentum buffers by its new rate over its old one, in place.

    Parameters that have not been updated yet have no buffer and need no correction. At rate 0 the
    buffer is 0, by v = r u: momentum then starts afresh when the rate rises again. Raises
    `UserError` when the optimizer's state has no buffer of that name at all.
    """
    check_rate_is_absorbed(optimizer, buffer_name)
    _check_buffer_exists(optimizer, buffer_name)
    for group, old, new in zip(optimizer.param_groups, old_rates, new_rates, strict=True):
        if old == new:
            continue
        factor = new / old if old > 0 else 0.0
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).get(buffer_name)
            if buffer is not None:
                buffer.mul_(factor)


def _check_buffer_exists(optimizer: torch.optim.Optimizer, buffer_name: str) -> None:
    names = {name for state in optimizer.state.values() for name in state}
    if names and buffer_name not in names:
        raise UserError(
            f"{type(optimizer).__name__} keeps no {buffer_name!r} in its state, only "
            f"{sorted(names)}. Pass the name of the buffer that has absorbed the rate."
        )

"""Why gradients cannot be averaged: the errors of `GradientReducer`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.errors import UserError

_SHOWN = 5


def arrived_twice(name: str) -> UserError:
    return UserError(
        f"the gradient of {name!r} arrived twice in one backward pass: it is used in several "
        "reentrant checkpoints. Write torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
    )


def unfit(name: str, gradient: torch.Tensor) -> UserError:
    """For a gradient that cannot be copied into a buffer."""
    if gradient.layout is not torch.strided:
        return UserError(
            f"the gradient of {name!r} is sparse, and gradients are averaged as dense ones here. "
            "Build the layer with sparse=False, or train by `hogwild` or on parameter servers, "
            "which take it."
        )
    return UserError(
        f"backward(create_graph=True) has made a gradient of {name!r} that can be differentiated "
        "again, and an average over ranks cannot. Compute it with "
        "torch.autograd.grad(loss, parameters, create_graph=True), or under run.no_sync(model)."
    )


def failed_pass() -> UserError:
    return UserError(
        "the last backward pass has failed, and its gradients are not averages. Call zero_grad() "
        "and compute them again before the step."
    )


def unreached(names: Sequence[str]) -> UserError:
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return UserError(
        f"no gradient reached {shown} through the model's reentrant checkpoints, and without it "
        "the others are not averaged. Write torch.utils.checkpoint.checkpoint(…, "
        "use_reentrant=False), or freeze what is not used."
    )

"""Steps that compute their gradients in a closure, as L-BFGS and Lightning do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_gradients(args: Any, kwargs: Any, act: Callable[[], None]) -> Any:
    """For a hook before the optimizer's step: calls `act` when the gradients are there.

    That is now, or each time that the step's closure has computed them. Returns what the hook must
    return: the arguments of the step, where they are others.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        act()
        return None

    # Gradients of a step with a closure do not exist before it: those that are there now are the
    # last step's.
    def compute() -> Any:
        loss = closure()
        act()
        return loss

    return args[:1], {**kwargs, "closure": compute}

"""Hooks on weights: each is called once a step, with the gradient of the whole step.

In the plain model a step is one backward pass, and a hook of a weight (`weight.register_hook`,
`register_post_accumulate_grad_hook`) is called with all of its gradient. Under a layout there is a
backward pass for every micro-batch, and each rank with a copy of the stage or with a tile has a
part of the gradient. A hook that clips would clip parts. So hooks are held back until the parts
have been added up, and then run in a backward pass of their own, in which nothing is computed:

    schedule   B0 B1 B2 B3 ─▶ added up ─▶ strategy ─▶ hooks ─▶ clipping, optimizer

Hooks that the strategies of this library have set are not the user's, and left where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from farandole.errors import InexactError
from farandole.layout.pipeline.gradient_bridge import GradientBridge, KnownGradients

_OWN = __name__.partition(".")[0]
_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_Hooks = dict[int, Any]


class WeightHooks:
    """Of the weights that a rank holds. `names`: of the gradient bridge's weights, in the whole
    model. `whole`: whether that is all of them."""

    def __init__(self, bridge: GradientBridge, names: Mapping[str, str], *, whole: bool) -> None:
        self._bridge = bridge
        self._names = names
        self._whole = whole
        self._held: list[tuple[_Hooks, _Hooks]] = []  # where hooks were, and these hooks

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, backward passes call none of them."""
        self._held = [(hooks, users) for _, hooks in self._all() if (users := _of_the_user(hooks))]
        for hooks, users in self._held:
            self._refuse_joint(users)
            _leave_out(hooks, users)
        try:
            yield
        finally:
            self._put_back()

    def refuse_new(self) -> None:
        """Raises `InexactError` naming a weight that got a hook while hooks were held back."""
        for name, hooks in self._all():
            for hook in _of_the_user(hooks).values():
                raise InexactError(
                    f"the model's forward sets a hook ({getattr(hook, '__qualname__', hook)!s}) on "
                    f"the weight {name!r}. It would see the gradient of one micro-batch on one "
                    f"rank, and not the weight's. Set the hook once, before training: then it is "
                    f"called once a step with the whole gradient."
                )

    def _refuse_joint(self, users: _Hooks) -> None:
        """`register_multi_grad_hook` waits for weights that may be on other ranks."""
        if not self._whole and any(
            _module(hook) == "torch.autograd.graph" for hook in users.values()
        ):
            raise InexactError(
                "a hook for several weights at once (register_multi_grad_hook) would see those of "
                "one stage alone. Set a hook on each weight, or take a layout without stages."
            )

    def run(self) -> None:
        """Gives the weights their gradients once more, through the hooks that are held back."""
        if not self._held:
            return
        weights = [weight for weight in self._bridge.trained() if weight.grad is not None]
        # The hooks that are still there are the strategy's. They have seen this gradient in the
        # bridge, and must not send it to the other replicas a second time.
        aside = [(hooks, dict(hooks)) for _, hooks in self._all()]
        for hooks, strategys in aside:
            _leave_out(hooks, strategys)
        self._put_back()
        try:
            if weights:
                gradients = []
                for weight in weights:
                    gradients.append(weight.grad)
                    weight.grad = None
                KnownGradients.apply(gradients, *weights).backward()
        finally:
            # Read anew: a hook may have removed itself or set another.
            self._held = [(hooks, dict(hooks)) for _, hooks in self._all() if hooks]
            for hooks, users in self._held:
                _leave_out(hooks, users)
            for hooks, strategys in aside:
                hooks.update(strategys)

    def _put_back(self) -> None:
        held, self._held = self._held, []
        for hooks, users in held:
            late = dict(hooks)
            hooks.clear()
            hooks.update(users)  # in the order in which they were set
            hooks.update(late)

    def _all(self) -> Iterator[tuple[str, _Hooks]]:
        for name, weight in self._bridge.named_parameters():
            for kind in _KINDS:
                hooks = getattr(weight, kind, None)
                if hooks is not None:
                    yield self._names.get(name, name), hooks


def _of_the_user(hooks: _Hooks) -> _Hooks:
    return {
        number: hook for number, hook in hooks.items() if _module(hook).partition(".")[0] != _OWN
    }


def _leave_out(hooks: _Hooks, some: _Hooks) -> None:
    for number in some:
        hooks.pop(number, None)


def _module(hook: Any) -> str:
    return str(getattr(hook, "__module__", ""))

"""Notices when a script changes parameters itself, where the servers would undo it.

The servers hold the model. What a script does to its own copy between two steps (clips weights,
loads others, trains them with a second optimizer) is lost when the next values arrive from there.

PyTorch counts changes of a tensor, and a look at the counts costs next to nothing. Two things need
the values: changes by way of `.data` are not counted, and what was changed and put back again
(averaged weights for an evaluation, a step of SAM) harms nothing. So the values are kept now and
then, or taken from what has just been read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from farandole.errors import UserError
from farandole.sync.common.frozen import can_be_trained

_FIRST_STEPS, _EVERY_STEPS = 4, 64
_INSTEAD = (
    "the servers hold the model, do not know of it, and would undo it. Load weights by run.load or "
    "before the first step, give all that is trained to one optimizer, or take a strategy that "
    "leaves the model with the workers, such as allreduce or local"
)


def keeps_values(step: int) -> bool:
    """Whether values are kept behind this step: that takes memory, and a pass over it."""
    return step < _FIRST_STEPS or step % _EVERY_STEPS == 0


class Untouched:
    """The parameters of a model. `held`: those that the servers hold, by name."""

    def __init__(self, model: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
        self._held = held
        known = set(held.values())
        others = ((n, p) for n, p in model.named_parameters() if p not in known)
        self._others = {name: p for name, p in others if can_be_trained(p)}
        self._counts: list[int] = []
        self._other_counts: list[int] = []
        self._values: Sequence[torch.Tensor] | None = None
        self._is_thorough = False

    def note_step(self, step: int) -> None:
        """An optimizer has moved them."""
        copies = None
        if keeps_values(step):
            copies = [parameter.detach().clone() for parameter in self._held.values()]
        self.note(copies, step)

    def note(self, values: Sequence[torch.Tensor] | None, step: int) -> None:
        """What is there now is as it should be. `values`: the same, where somebody keeps it."""
        self._counts = _counts(self._held)
        self._values = values
        self._is_thorough = values is not None and keeps_values(step)

    def note_others(self) -> None:
        """Those that are not held have not been trained so far."""
        self._other_counts = _counts(self._others)

    def require(self) -> None:
        """Raises `UserError` if a parameter is another than when it was noted."""
        if not self._is_thorough and _counts(self._held) == self._counts:
            return
        changed = self._first_changed()
        if changed is not None:
            raise UserError(
                f"{changed!r} has been changed outside of the optimizer's step: {_INSTEAD}."
            )

    def require_one_optimizer(self) -> None:
        """Raises `UserError` if a parameter that has a gradient, and is not held, has changed."""
        counts = zip(_counts(self._others), self._other_counts, strict=True)
        for (name, parameter), (now, before) in zip(self._others.items(), counts, strict=True):
            if parameter.grad is not None and now != before:
                raise UserError(
                    f"{name!r} is trained, and not by the optimizer that run.distribute was given: "
                    f"{_INSTEAD}."
                )

    def _first_changed(self) -> str | None:
        if self._values is None:
            pairs = zip(self._held, _counts(self._held), self._counts, strict=True)
            return next((name for name, now, before in pairs if now != before), None)
        values = zip(self._held.items(), self._values, strict=True)
        return next((name for (name, now), value in values if not _same(now, value)), None)


def _counts(parameters: Mapping[str, nn.Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters.values()]


def _same(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    now = parameter.detach()
    if now.is_complex() and not value.is_complex():
        now = torch.view_as_real(now)
    now = now.to(value.device)
    # The second is slower, and takes two NaNs for the same.
    return torch.equal(now, value) or torch.allclose(now, value, 0, 0, equal_nan=True)

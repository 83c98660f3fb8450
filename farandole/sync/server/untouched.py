"""Notices when a script changes parameters itself, where the servers would undo it.

The servers hold the model. What a script does to its own copy between two steps (clips weights,
loads others) is lost when the next values arrive from there.

PyTorch counts changes of a tensor, and a look at the counts costs next to nothing. Two things need
the values: changes by way of `.data` are not counted, and what was changed and put back again
(averaged weights for an evaluation, a step of SAM) harms nothing. So the values are kept now and
then, or taken from what has just been read. Where neither is there, a change that is counted is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from farandole.errors import UserError

_FIRST_STEPS, _EVERY_STEPS = 4, 64
_ROUNDINGS = 16  # by which what was added and taken away again may be apart


def _keeps_values(step: int) -> bool:
    """Whether values are kept behind this step: that takes memory, and a pass over it."""
    return step < _FIRST_STEPS or step % _EVERY_STEPS == 0


class Untouched:
    """The parameters that the servers hold, by name."""

    def __init__(self, held: Mapping[str, nn.Parameter]) -> None:
        self._held = held
        self._counts: list[int] = []
        self._values: Sequence[torch.Tensor] | None = None
        self._is_thorough = False

    @property
    def has_values(self) -> bool:
        return self._values is not None

    def note_step(self, step: int) -> None:
        """An optimizer has moved them, and nobody keeps their values."""
        self._values = None  # the last copies make room
        copies = None
        if _keeps_values(step):
            copies = [parameter.detach().clone() for parameter in self._held.values()]
        self.note(copies, step)

    def note(self, values: Sequence[torch.Tensor] | None, step: int) -> None:
        """What is there now is as it should be. `values`: the same, where somebody keeps it."""
        self._counts = self._count()
        self._values = values
        self._is_thorough = values is not None and _keeps_values(step)

    def require(self, *, by_value: bool = False) -> None:
        """Raises `UserError` if a parameter is another than when it was noted. `by_value`: compares
        values wherever there are any, also where counts say that nothing has changed."""
        if not (by_value or self._is_thorough) and self._count() == self._counts:
            return
        changed = self._first_changed()
        if changed is not None:
            raise UserError(
                f"{changed!r} has been changed outside of the optimizer's step: the servers hold "
                "the model, do not know of it, and would undo it. Load weights by run.load or "
                "before the first step, or take a strategy that leaves the model with the workers, "
                "such as allreduce or local."
            )

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._held.values()]

    def _first_changed(self) -> str | None:
        if self._values is None:
            pairs = zip(self._held, self._count(), self._counts, strict=True)
            return next((name for name, now, before in pairs if now != before), None)
        values = zip(self._held.items(), self._values, strict=True)
        return next((name for (name, now), value in values if not _same(now, value)), None)


def limited_weights(model: nn.Module) -> dict[torch.Tensor, str]:
    """Those of embeddings with a `max_norm`, which the forward pass itself scales, by name."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {
        module.weight: f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.max_norm is not None
    }


def refuse_limited_weights(model: nn.Module, instead: str) -> None:
    """For strategies whose servers take gradients: they would not learn of it."""
    for name in limited_weights(model).values():
        raise UserError(
            f"{name!r} belongs to an embedding with a max_norm, which scales its weights in the "
            f"forward pass. The servers do not do that. Take {instead}."
        )


def _same(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    now = parameter.detach()
    if now.is_complex() and not value.is_complex():
        now = torch.view_as_real(now)
    now = now.to(value.device)
    if torch.equal(now, value):
        return True
    part = value.abs().nan_to_num(0.0, 0.0, 0.0)
    apart = _ROUNDINGS * torch.finfo(value.dtype).eps * float(part.max())
    return torch.allclose(now, value, 0, apart, equal_nan=True)

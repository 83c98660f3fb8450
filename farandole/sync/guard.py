"""Stops before gradients that are not finite are applied, and names the rank they came from.

After an average all ranks hold the same NaN, and nobody can see whose it was. So each rank notes,
before it gives its gradients away, whether they were sound; when the average is not, the ranks
compare their notes. No parameter has changed by then.

A gradient scaler finds infinities on purpose, and then skips the step: what it skips is not seen
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.tensors import is_finite
from farandole.sync.meeting import diverged

_PASSES = 2  # a gradient may be applied one step late


class GradientGuard:
    """`group` is who shares an average with this rank, None if nobody does; `ranks` their numbers
    in the world."""

    def __init__(self, optimizer: Optimizer, group: Group | None, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = ranks
        self._steps = 0
        self._noted: deque[list[tuple[list[str], torch.Tensor]]] = deque(
            [[]], maxlen=_PASSES + 1
        )  # the last list is of the pass to come
        self._hook = optimizer.register_step_pre_hook(self._check)

    def stop(self) -> None:
        """Gradients are no longer shared: a rank that asked the others would ask in vain."""
        self._hook.remove()

    def note(self, names: list[str], buffer: torch.Tensor, *, last: bool) -> None:
        """This rank's own gradients of one bucket, before they are averaged."""
        self._noted[-1].append((names, buffer.sum()))  # read later: a GPU need not be waited for
        if last:
            self._noted.append([])

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a scaler has left it to the optimizer to skip the step
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
        if not dense or _all_finite(dense):
            return
        mine = self._culprit()
        names = [mine] if self.group is None else self.group.gather_json(mine)
        for rank, name in zip(self.ranks, names, strict=True):
            if name is not None:
                raise diverged(rank, self._steps, f"its gradient of {name}")
        raise diverged(self.ranks[0], self._steps, "an average of gradients")

    def _culprit(self) -> str | None:
        for noted in self._noted:
            for names, total in noted:
                if not is_finite(total):
                    return repr(names[0]) if len(names) == 1 else f"one of {names}"
        return None


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    largest = torch._foreach_norm(gradients, float("inf"))
    return all(
        bool(torch.isfinite(torch.stack([n for n in largest if n.device == device])).all())
        for device in dict.fromkeys(norm.device for norm in largest)
    )

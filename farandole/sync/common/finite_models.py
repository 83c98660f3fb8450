"""Whether models are finite, after a pass over the data.

Gradients are looked at before they are applied. That does not see what an update makes of finite
numbers (an infinity, where the rate is too high), statistics of BatchNorm that are not finite in
layers that do not spread them, or the gradients of a model whose optimizer nobody has shown to
Farandole. Those are found here, after the fact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.tensors import is_finite
from farandole.sync.common.flat import statistics_of
from farandole.sync.common.guard import Culprit

_TOO_LATE = "The model has changed already: go on from an earlier checkpoint."


def require_finite(models: Sequence[nn.Module], group: Group, step: int) -> None:
    """*Together.* Raises `DivergedError` on all ranks if a model of any of them is not finite."""
    what = next((found for model in models if (found := _first_not_finite(model))), None)
    mine = None if what is None else Culprit(group.rank, step, what, _TOO_LATE)
    anything = group.all_reduce(torch.tensor(0.0 if mine is None else 1.0), "max")
    if not anything:
        return
    for found in group.gather_json(mine):
        if found is not None:
            raise Culprit(*found).error


def _first_not_finite(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"its parameter {name!r}"
    for name, statistic in statistics_of(model).items():
        if not _is_finite(statistic):
            return f"its statistic {name!r}"
    return None


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return is_finite(torch.view_as_real(tensor) if tensor.is_complex() else tensor)

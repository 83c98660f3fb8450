"""Whether a saved state fits a model, found out before the model is changed.

PyTorch's `load_state_dict` copies what fits and raises afterwards, so that a model that was refused
its state has half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def require_fitting_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raises `RuntimeError`, as `load_state_dict` does, or `ValueError`. Changes nothing."""
    here = model.state_dict()
    for name, value in saved.items():
        if name in here and _is_other_kind(value, here[name]):
            raise ValueError(f"{name!r} is {_kind(value)}, and {_kind(here[name])} in this script")
    if here.keys() == saved.keys() and not any(_differs(saved[name], here[name]) for name in here):
        return
    # Modules may rename or reshape what they load. Only the model itself knows: it is asked, and
    # put back.
    before = {name: _copy(value) for name, value in here.items()}
    try:
        model.load_state_dict(dict(saved))
    finally:
        model.load_state_dict(before, strict=False)


def _differs(saved: Any, here: Any) -> bool:
    if not isinstance(here, torch.Tensor):
        return False
    return bool(saved.shape != here.shape)


def _is_other_kind(saved: Any, here: Any) -> bool:
    """What `copy_` would take, and make something else of."""
    if not isinstance(here, torch.Tensor):
        return False
    if not isinstance(saved, torch.Tensor):
        return True
    return (saved.is_complex(), saved.is_floating_point()) != (
        here.is_complex(),
        here.is_floating_point(),
    )


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

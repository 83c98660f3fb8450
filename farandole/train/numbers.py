"""Numbers on their way through a run: reduced in float64, logged as plain numbers, shown short."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from farandole.errors import UserError

T = TypeVar("T", float, torch.Tensor)


def double(value: float | torch.Tensor) -> torch.Tensor:
    """A tensor of its own to reduce, in float64: a mean over many ranks keeps all its digits."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64, copy=True)
    return torch.tensor(value, dtype=torch.float64)


def like(value: T, result: torch.Tensor) -> T:
    """`result` as what `value` is; a mean of integers is not an integer."""
    if isinstance(value, torch.Tensor):
        return result.to(value.dtype) if value.is_floating_point() else result
    return float(result)


def plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UserError(
                f"run.log({name}=…) takes single numbers; this tensor has shape "
                f"{tuple(value.shape)}."
            )
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"run.log({name}={value!r}): that is not a number or text.") from None


def short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

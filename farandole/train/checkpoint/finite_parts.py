"""Which tensors of a checkpoint are not finite, so that it says so itself.

A model that has diverged is still saved, for whoever wants to look at it, but it must not push out
the last one that had not. NaN counts everywhere. Infinity counts in parameters and in the state of
an optimizer, and not in buffers: a mask of attention is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from farandole.serialization import pack

_MOST_NAMES = 3  # that are worth keeping


def not_finite_names(parts: Mapping[str, Any]) -> list[str]:
    """`model-0: layer.weight`, of the models and optimizers among `parts`; the first few."""
    found = []
    for name in _not_finite(parts):
        found.append(name)
        if len(found) == _MOST_NAMES:
            break
    return found


def _not_finite(parts: Mapping[str, Any]) -> Iterator[str]:
    for part, value in parts.items():
        kind, _, index = part.partition("-")
        if kind == "model":
            trained = _trained(parts.get(f"optimizer-{index}"))
            for name, tensor in value.items():
                if isinstance(tensor, torch.Tensor) and not _is_fine(tensor, name in trained):
                    yield f"{part}: {name}"
        elif kind == "optimizer":
            for name, tensor in pack(value.get("named", value))[1].items():
                if not _is_fine(tensor, finite=True):
                    yield f"{part}: {name}"


def _trained(optimizer: Mapping[str, Any] | None) -> set[str]:
    groups = (optimizer or {}).get("groups", [])
    return {name for group in groups for name in group.get("names", [])}


def _is_fine(tensor: torch.Tensor, finite: bool) -> bool:
    """`finite`: infinity is not fine either."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    plain = tensor.detach()
    if plain.is_floating_point() and plain.element_size() == 1:  # few operations know these
        plain = plain.to(torch.float32)
    # One pass that makes nothing. A sum of finite numbers may be infinite: then it is looked at.
    if torch.isfinite(plain.sum()):
        return True
    return bool((torch.isfinite(plain) if finite else ~torch.isnan(plain)).all())

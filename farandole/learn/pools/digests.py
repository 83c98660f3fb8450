"""Whether ranks begin a pass with the same: a short text that differs where two states do."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch


def digest(state: Any) -> str:
    """Of arrays, tensors, numbers, texts, and what is made of them. Raises `TypeError` else."""
    seen = hashlib.blake2b(digest_size=12)
    _add(seen, state)
    return seen.hexdigest()


def _add(seen: hashlib.blake2b, value: Any) -> None:
    seen.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        seen.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype == object:
            _add(seen, value.tolist())
        else:
            seen.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(seen, key)
            _add(seen, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(seen, each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _add(seen, getattr(value, field.name))
    elif isinstance(value, (str, bytes, int, float, complex, bool)):
        seen.update(repr(value).encode())
    elif value is not None:
        # Its text would differ between two processes, and to leave it out would hide a difference.
        raise TypeError(f"ranks cannot compare a state that holds {type(value).__name__}")

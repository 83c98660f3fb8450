"""What a run's checkpoint must hold, looked at before any of it is used.

A file with the right checksum may still hold anything. What is wrong is a `ValueError` that names
the part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

Kind = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_list_of(kind: Kind) -> Kind:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_position(value: Any) -> bool:
    """Of a loader."""
    if not _is_named(value) or not _is_count(value.get("epoch")):
        return False
    rows = {"drawn": torch.int64, "returned": torch.int64, "speeds": torch.float64}
    if not all(_is_row(value[name], dtype) for name, dtype in rows.items() if name in value):
        return False
    if "readers" in value and not _are_readers(value["readers"]):
        return False
    return _is_count(value.get("done_samples"))


def _is_row(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == dtype


def _are_readers(value: Any) -> bool:
    """Of an epoch of chunks: three counts, two flags, and the ranks' shares."""
    if not isinstance(value, list) or len(value) != 6:
        return False
    counts, flags, quotas = value[:3], value[3:5], value[5]
    if not all(type(each) is int and each > 0 for each in counts):
        return False
    return all(type(each) is bool for each in flags) and _is_list_of(_is_count)(quotas)


_RUN: Final[Mapping[str, Kind]] = {
    "samples": _is_count,
    "steps": _is_count,
    "seconds": _is_number,
    "next_epoch": _is_count,
    "loaders": _is_list_of(_is_position),
    "size": _is_count,
    "sync": _is_text,
    "waited_seconds": _is_number,
    "bytes_sent": _is_number,
}


def check_contents(parts: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless `parts` are those of a run's checkpoint."""
    _check_run(parts.get("run"))
    if not _is_named(parts.get("state")):
        raise ValueError("part 'state' is none")
    models = set()
    for name, value in parts.items():
        kind, _, index = name.partition("-")
        if kind == "model":
            models.add(index.split(".")[0])
            _require(_is_named(value), name)
        elif kind == "optimizer":
            _require(_is_optimizer(value), name)
        elif kind == "rank":
            _require(_is_rank(value), name)
    if models != {str(index) for index in range(len(models))}:
        raise ValueError("its models are not numbered from 0")


def check_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Raises an error unless `restore_random_state` takes it. Tries it on other generators."""
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.Generator(device).set_state(state["cuda"])


def _check_run(part: Any) -> None:
    if not _is_named(part):
        raise ValueError("part 'run' is none")
    for name, kind in _RUN.items():
        if not kind(part.get(name)):
            raise ValueError(f"part 'run': {name} is {str(part.get(name))[:40]!r}")
    if not _is_text(part.get("layout", "")):
        raise ValueError("part 'run': layout is none")


def _is_optimizer(value: Any) -> bool:
    if not _is_named(value) or not isinstance(value.get("kind"), str | None):
        return False
    if "named" in value:
        groups, named = value.get("groups"), value["named"]
        return (
            _is_named(named)
            and _is_list_of(_is_named)(groups)
            and all(_is_list_of(_is_text)(group.get("names")) for group in groups)
        )
    groups, state = value.get("param_groups"), value.get("state")
    return (
        isinstance(state, dict)
        and _is_list_of(_is_named)(groups)
        and all(_is_list_of(_is_count)(group.get("params")) for group in groups)
    )


def _is_rank(value: Any) -> bool:
    if not _is_named(value) or not _is_list_of(_is_named)(value.get("sync")):
        return False
    return _is_named(value.get("random")) and {"python", "numpy", "torch"} <= value["random"].keys()


def _require(good: bool, name: str) -> None:
    if not good:
        raise ValueError(f"part {name!r} is not what its name says")

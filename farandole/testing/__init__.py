"""Tools for testing what runs on many ranks; public, for users' tests too.

Names are imported when first used: the emulated cluster needs no torch, and starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.emulate.cluster import Cluster
    from farandole.testing.world import run_world

_HOME = {"Cluster": "farandole.emulate.cluster", "run_world": "farandole.testing.world"}

__all__ = ["Cluster", "run_world"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'farandole.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

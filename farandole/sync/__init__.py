"""How replicas stay in step: the strategies, and their text form.

Names are imported when first used: the list of strategies is wanted where torch is not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from farandole.sync.registry import STRATEGIES, parse, register

if TYPE_CHECKING:
    from farandole.sync.allreduce.lagged import Lagged
    from farandole.sync.allreduce.strategy import AllReduce
    from farandole.sync.base import Strategy, Synchronizer
    from farandole.sync.common.alignment import InStep, in_step
    from farandole.sync.daso.strategy import Daso
    from farandole.sync.hogwild.strategy import Hogwild
    from farandole.sync.periodic.adacomm import AdaComm
    from farandole.sync.periodic.local import DiLoCo, Federated, Local
    from farandole.sync.periodic.postlocal import PostLocal
    from farandole.sync.server.strategies import Downpour, Server

__all__ = [
    "STRATEGIES",
    "AdaComm",
    "AllReduce",
    "Daso",
    "DiLoCo",
    "Downpour",
    "Federated",
    "Hogwild",
    "InStep",
    "Lagged",
    "Local",
    "PostLocal",
    "Server",
    "Strategy",
    "Synchronizer",
    "in_step",
    "parse",
    "register",
]

_HOMES = {
    "InStep": "farandole.sync.common.alignment",
    "Strategy": "farandole.sync.base",
    "Synchronizer": "farandole.sync.base",
    "in_step": "farandole.sync.common.alignment",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        found = STRATEGIES.home_of(name)
    if found is None:
        raise AttributeError(f"module 'farandole.sync' has no attribute {name!r}")
    globals()[name] = found
    return found

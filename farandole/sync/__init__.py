"""How replicas stay in step: the strategies, and their text form."""

from __future__ import annotations

from types import MappingProxyType

from farandole.errors import UserError, nearest
from farandole.options import parse_options
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

_KINDS: tuple[type[Strategy], ...] = (
    AllReduce,
    Lagged,
    Local,
    PostLocal,
    AdaComm,
    DiLoCo,
    Federated,
    Daso,
    Hogwild,
    Server,
    Downpour,
)
STRATEGIES = MappingProxyType({kind.name: kind for kind in _KINDS})

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
]


def parse(text: str) -> Strategy:
    """The strategy that `name` or `name:key=value,…` describes.

    Raises `UserError` with the nearest name for an unknown strategy or key.
    """
    name, _, options = text.strip().partition(":")
    if name not in STRATEGIES:
        raise UserError(f"there is no strategy {name!r}. {nearest(name, STRATEGIES)}")
    shorthands = STRATEGIES[name].shorthands
    items = [item.strip() for item in options.split(",")]
    options = ",".join(shorthands.get(item, item) for item in items)
    strategy: Strategy = parse_options(STRATEGIES[name], options, what=f"strategy {name!r}")
    return strategy

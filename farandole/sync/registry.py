"""The strategies by name. A new one is listed here, or registered by whoever defines it.

Nothing here imports torch: help texts list the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from farandole.errors import UserError, nearest
from farandole.options import parse_options
from farandole.registry import Registry

if TYPE_CHECKING:
    from farandole.sync.base import Strategy

S = TypeVar("S", bound="type[Strategy]")

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "allreduce": "farandole.sync.allreduce.strategy:AllReduce",
        "lagged": "farandole.sync.allreduce.lagged:Lagged",
        "local": "farandole.sync.periodic.local:Local",
        "postlocal": "farandole.sync.periodic.postlocal:PostLocal",
        "adacomm": "farandole.sync.periodic.adacomm:AdaComm",
        "diloco": "farandole.sync.periodic.local:DiLoCo",
        "federated": "farandole.sync.periodic.local:Federated",
        "daso": "farandole.sync.daso.strategy:Daso",
        "hogwild": "farandole.sync.hogwild.strategy:Hogwild",
        "server": "farandole.sync.server.strategies:Server",
        "downpour": "farandole.sync.server.strategies:Downpour",
    },
)


def register(kind: S) -> S:
    """A class decorator: `@register` makes a strategy of your own known by its `name`.

    From then on its text form works wherever a strategy's does in this process.
    """
    STRATEGIES.register(kind.name, kind)
    return kind


def parse(text: str) -> Strategy:
    """The strategy that `name` or `name:key=value,…` describes.

    Raises `UserError` with the nearest name for an unknown strategy or key.
    """
    name, _, options = text.strip().partition(":")
    if name not in STRATEGIES:
        raise UserError(f"there is no strategy {name!r}. {nearest(name, STRATEGIES)}")
    kind = STRATEGIES[name]
    items = [item.strip() for item in options.split(",")]
    options = ",".join(kind.shorthands.get(item, item) for item in items)
    strategy: Strategy = parse_options(kind, options, what=f"strategy {name!r}")
    return strategy

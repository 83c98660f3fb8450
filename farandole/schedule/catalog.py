"""The algorithms by name. A new one is listed here, and is then tested, run and planned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from farandole.errors import UserError, nearest
from farandole.schedule.halving import halving_doubling
from farandole.schedule.levels import most_square, torus, two_level
from farandole.schedule.rings import ring
from farandole.schedule.rounds import Schedule, require_ranks
from farandole.schedule.stars import naive, parameter_server
from farandole.schedule.trees import double_tree
from farandole.topology import Topology

Builder = Callable[[int, Topology | None], Schedule]

ALGORITHMS: Mapping[str, Builder] = MappingProxyType(
    {
        "naive": lambda ranks, topology: naive(ranks),
        "parameter_server": lambda ranks, topology: parameter_server(ranks),
        "ring": lambda ranks, topology: ring(ranks),
        "halving_doubling": lambda ranks, topology: halving_doubling(ranks),
        "double_tree": lambda ranks, topology: double_tree(ranks),
        "two_level": lambda ranks, topology: two_level(topology or Topology.single(ranks)),
        "torus": lambda ranks, topology: torus(*most_square(ranks)),
    }
)


def build(name: str, ranks: int, topology: Topology | None = None) -> Schedule:
    """The all-reduce `name` for `ranks` ranks.

    Only `two_level` looks at the topology; without one it takes all ranks to share a host.
    """
    if name not in ALGORITHMS:
        raise UserError(f"no all-reduce algorithm {name!r}. {nearest(name, ALGORITHMS)}")
    require_ranks(name, ranks)
    if topology is not None and topology.size != ranks:
        raise UserError(f"{name}: {ranks} ranks, but the topology holds {topology.size}.")
    return ALGORITHMS[name](ranks, topology)

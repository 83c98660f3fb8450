"""The algorithms by name. One that is registered here is tested, run and planned with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farandole.errors import UserError, nearest
from farandole.registry import Registry
from farandole.schedule.halving import halving_doubling
from farandole.schedule.levels import most_square, torus, two_level
from farandole.schedule.rings import ring
from farandole.schedule.rounds import Schedule, require_ranks
from farandole.schedule.stars import naive, parameter_server
from farandole.schedule.trees import double_tree
from farandole.topology import Topology

Builder = Callable[[int, Topology | None], Schedule]


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce, for any number of ranks."""

    make: Builder
    for_hosts: bool = False  # it looks at which ranks share a host; `auto` takes it for that alone

    def __call__(self, ranks: int, topology: Topology | None = None) -> Schedule:
        return self.make(ranks, topology)


ALGORITHMS: Registry[Algorithm] = Registry("all-reduce algorithm")


def register(name: str, make: Builder, *, for_hosts: bool = False) -> None:
    """Makes an all-reduce known: it can be checked, run, planned with, and chosen by `auto`."""
    ALGORITHMS.register(name, Algorithm(make, for_hosts))


register("naive", lambda ranks, topology: naive(ranks))
register("parameter_server", lambda ranks, topology: parameter_server(ranks))
register("ring", lambda ranks, topology: ring(ranks))
register("halving_doubling", lambda ranks, topology: halving_doubling(ranks))
register("double_tree", lambda ranks, topology: double_tree(ranks))
register(
    "two_level",
    lambda ranks, topology: two_level(topology or Topology.single(ranks)),
    for_hosts=True,
)
register("torus", lambda ranks, topology: torus(*most_square(ranks)))


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

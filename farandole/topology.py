"""Who sits where: hosts and the ranks on them. Pure data, no torch, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from farandole.errors import UserError

EMULATED: Final = "emulated-"
"""How the names of emulated hosts begin; their number follows."""


@dataclass(frozen=True)
class Host:
    """One machine (or what passes for one) and the ranks that live on it, in order."""

    name: str
    ranks: tuple[int, ...]

    @property
    def is_emulated(self) -> bool:
        return self.name.startswith(EMULATED)


@dataclass(frozen=True)
class Topology:
    """All hosts of a job. Every rank 0 … size-1 sits on exactly one of them."""

    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        seen = sorted(rank for host in self.hosts for rank in host.ranks)
        if not seen or seen != list(range(len(seen))):
            raise UserError(
                f"the hosts hold ranks {seen}; every rank from 0 on must sit on exactly one host."
            )

    @classmethod
    def single(cls, size: int, name: str = "localhost") -> Topology:
        """`size` ranks on one host."""
        return cls((Host(name, tuple(range(size))),))

    @classmethod
    def from_names(cls, names: Sequence[str]) -> Topology:
        """From each rank's host name, in rank order; ranks of a host need not be neighbours."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name, []).append(rank)
        return cls(tuple(Host(name, tuple(on_host)) for name, on_host in ranks.items()))

    @classmethod
    def declared(cls, counts: Sequence[int]) -> Topology:
        """Hosts that somebody says there are, with so many ranks on each, in rank order."""
        if not counts or min(counts) < 1:
            raise UserError(f"hosts of {list(counts)} workers: each must have at least one.")
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        ranks = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return cls(tuple(Host(f"host-{index}", tuple(on)) for index, on in enumerate(ranks)))

    @property
    def size(self) -> int:
        return sum(len(host.ranks) for host in self.hosts)

    def host_index(self, rank: int) -> int:
        for index, host in enumerate(self.hosts):
            if rank in host.ranks:
                return index
        raise UserError(f"there is no rank {rank} among {self.size} ranks.")

    def host(self, rank: int) -> Host:
        return self.hosts[self.host_index(rank)]

    def local_rank(self, rank: int) -> int:
        return self.host(rank).ranks.index(rank)

    def local_size(self, rank: int) -> int:
        return len(self.host(rank).ranks)

    def __str__(self) -> str:
        return ", ".join(f"{host.name}: {_ranges(host.ranks)}" for host in self.hosts)


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3,6` for (0, 1, 2, 3, 6)."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

"""Who holds what, as the registrar says: the view that servers and clients act on. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chain:
    """The replicas of a range, the one that serves it first. `epoch` grows with every change."""

    epoch: int
    servers: tuple[int, ...]

    @property
    def head(self) -> int | None:
        """None when all who held the range are dead."""
        return self.servers[0] if self.servers else None


@dataclass(frozen=True)
class View:
    """Later views have a greater `number`. A range that is in epoch 1 begins empty."""

    number: int = 0
    addresses: dict[int, str] = field(default_factory=dict)
    chains: tuple[Chain, ...] = ()
    members: tuple[int, ...] = ()  # the workers whose clocks count
    gone: tuple[int, ...] = ()  # workers that were given up: nothing of theirs is taken any more
    lost_because: str = ""  # why ranges are lost, if any are

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "addresses": [[server, address] for server, address in self.addresses.items()],
            "chains": [[chain.epoch, list(chain.servers)] for chain in self.chains],
            "members": list(self.members),
            "gone": list(self.gone),
            "lost_because": self.lost_because,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> View:
        return cls(
            number=value["number"],
            addresses={int(server): str(address) for server, address in value["addresses"]},
            chains=tuple(Chain(epoch, tuple(servers)) for epoch, servers in value["chains"]),
            members=tuple(value["members"]),
            gone=tuple(value["gone"]),
            lost_because=value["lost_because"],
        )


@dataclass(frozen=True)
class Reshape:
    """To the head of a range: bring it to the servers of this chain, and then say `Reshaped`.

    It answers to the epoch that it is an order for; in any other epoch it means nothing.
    """

    range: int
    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Reshaped:
    """From the head: the servers of the new chain hold the range, and it changes no more here."""

    range: int
    epoch: int

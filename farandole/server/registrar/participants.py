"""Who is connected to the registrar: servers, workers, guests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Participant:
    """A server or a client."""

    peer: bytes
    role: str  # "server", "worker", "guest", or "late": a worker that does not count yet
    number: int
    rank: int = -1
    waits_to_enter: bool = False  # it came late, and is ready for the next epoch
    mark: str = ""  # by which whoever started a server knows it again
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)  # what a server says of itself

    @property
    def title(self) -> str:
        return f"server {self.number}" if self.role == "server" else f"rank {self.rank}"


class Participants:
    """All of them, by their address on the control socket."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Participant] = {}

    def __iter__(self) -> Iterator[Participant]:
        """Over a copy of the list: they come and go meanwhile, and `facts` is asked for by another
        thread."""
        return iter(list(self._by_peer.values()))

    def get(self, peer: bytes) -> Participant | None:
        return self._by_peer.get(peer)

    def add(self, participant: Participant) -> None:
        self._by_peer[participant.peer] = participant

    def remove(self, participant: Participant) -> None:
        del self._by_peer[participant.peer]

    def of_role(self, role: str) -> list[Participant]:
        return [participant for participant in self if participant.role == role]

    @property
    def ranks(self) -> list[int]:
        """Of the workers that count."""
        return [participant.rank for participant in self.of_role("worker")]

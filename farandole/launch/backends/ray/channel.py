"""Nodes of a Ray cluster, each reached through the actor that Ray has placed on it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

_BRIDGE = "farandole.launch.backends.ray.bridge"


@dataclass(frozen=True)
class RayActors:
    """A `Channel`. `actors` are their names by host."""

    address: str
    namespace: str
    actors: Mapping[str, str]
    name: ClassVar[str] = "Ray"

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        place = (self.address, self.namespace, self.actors[host])
        return [sys.executable, "-m", _BRIDGE, *place, *command]

    def advice(self, host: str) -> str:
        return f"Look at `ray status` and `ray list nodes` for the node of {host}."

    def address_of(self, host: str) -> str:
        """The engine knows a better one: that of Ray's own node."""
        return host

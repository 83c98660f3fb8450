"""The seam between the launcher and whatever reaches another host: ssh, srun, Ray.

A channel only starts one program on another host, and connects standard input and output. Orders
and secrets travel over these two streams, and never on a command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Channel(Protocol):
    """How other hosts are reached."""

    @property
    def name(self) -> str:
        """What people call it."""

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The local command that runs `command` on `host`.

        Its standard input and output are those of `command`, byte for byte. When its standard input
        ends, that of `command` ends too. What it writes to standard error is shown to the user when
        the host could not be reached.
        """

    def advice(self, host: str) -> str:
        """What the user can try when `host` could not be reached or was lost; a sentence."""

    def address_of(self, host: str) -> str:
        """The name or address under which the network knows `host`.

        Raises `LaunchError` where it cannot be found out.
        """

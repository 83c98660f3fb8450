"""Bytes on their way to the launcher, which may be slow to take them, or gone.

Nothing here waits. An agent that waited could not notice that its launcher is gone, nor end its
workers. Instead it reads no more of their output while too much is held.
"""

from __future__ import annotations

import os

_MOST_HELD_BYTES = 1 << 20


class Outgoing:
    """`descriptor` is watched for room to write in by whoever calls `flush`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_broken = False  # nobody reads any more
        self._held = bytearray()
        os.set_blocking(descriptor, False)

    def put(self, content: bytes) -> None:
        if not self.is_broken:
            self._held += content

    def flush(self) -> None:
        """Writes as much as there is room for."""
        try:
            while self._held:
                del self._held[: os.write(self.descriptor, self._held)]
        except BlockingIOError:
            return
        except OSError:
            self.give_up()

    def give_up(self) -> None:
        """Nobody will read what is held, nor what comes."""
        self.is_broken = True
        self._held.clear()

    @property
    def is_empty(self) -> bool:
        return not self._held

    @property
    def is_full(self) -> bool:
        return len(self._held) > _MOST_HELD_BYTES

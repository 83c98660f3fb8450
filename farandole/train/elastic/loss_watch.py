"""Interrupts collectives with a host that is lost, and whose connections are only silent.

When a process ends, its connections do, and whoever waits for it hears of it at once. When a host
or its network fails, nothing ends: its peers would wait for their whole timeout. The launcher
notices earlier, and says so in its store. There a thread waits for it.
"""

from __future__ import annotations

import os
import threading
import time

from farandole.comm import Transport
from farandole.worker.elastic import LauncherLostError, Losses

_SLICE_SECONDS = 5.0
_PATIENCE_SECONDS = 2.0  # for the collective to fail by itself, as it does when a process has ended


class LossWatch:
    """One rank's. Between ranks of one host nothing is silent, and no thread is started."""

    def __init__(self) -> None:
        self._followed: tuple[int, Transport] | None = None
        self._thread: threading.Thread | None = None

    def follow(self, generation: int, transport: Transport) -> None:
        """From now on ranks of this generation may be lost."""
        self._followed = generation, transport
        if len(transport.topology.hosts) > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="loss watch", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        losses = Losses(os.environ)
        interrupted: tuple[int, Transport] | None = None
        while True:
            followed = self._followed
            assert followed is not None
            if followed == interrupted:
                time.sleep(_PATIENCE_SECONDS)
                continue
            generation, transport = followed
            try:
                is_lost = losses.wait(generation, _SLICE_SECONDS)
            except LauncherLostError:
                return  # this process will be told so elsewhere
            if not is_lost:
                continue
            time.sleep(_PATIENCE_SECONDS)
            if self._followed == followed:
                transport.interrupt()
            interrupted = followed

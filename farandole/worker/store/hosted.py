"""Rank 0's store, for ranks that no launcher of ours has started: it serves it, and uses it."""

from __future__ import annotations

import atexit
from datetime import timedelta
from pathlib import Path

from farandole.worker.store.address import LOOPBACK, StoreAddress
from farandole.worker.store.client import StoreClient
from farandole.worker.store.server import StoreServer


class HostedStore(StoreClient):
    """Serves a store as `StoreServer` does, and is a client of it. Raises `OSError`."""

    def __init__(
        self,
        timeout: timedelta,
        path: Path | None = None,
        *,
        host: str | None = None,
        port: int = 0,
        token: bytes | None = None,
    ) -> None:
        self._server = StoreServer(path, host=host, port=port, token=token)
        if path is not None:
            own = StoreAddress(path)
        else:
            assert host is not None
            assert token is not None
            own = StoreAddress(None, _reached(host), self._server.port, token)
        super().__init__(own, timeout)
        atexit.register(self._server.close)
        self.keep()


def _reached(host: str) -> str:
    return LOOPBACK if host == "0.0.0.0" else host

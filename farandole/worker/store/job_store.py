"""The launcher's store. A launcher needs no torch, and starts without waiting for it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.errors import LaunchError
from farandole.worker.store.address import LOOPBACK, StoreAddress, new_token
from farandole.worker.store.server import StoreServer

if TYPE_CHECKING:
    from farandole.worker.store.client import StoreClient

_SOCKET = "store.socket"
_TIMEOUT = timedelta(seconds=60)


class JobStore:
    """In the job's `folder`, and on a TCP port of `address`.

    The port is for PyTorch's own clients, and for workers of other hosts. Raises `LaunchError`.
    """

    def __init__(self, folder: Path, address: str = LOOPBACK) -> None:
        self._path = folder / _SOCKET
        self._token = new_token()
        self._address = address
        try:
            self._server = StoreServer(
                self._path, host=address, token=self._token, torch_clients=True
            )
        except OSError as error:
            raise LaunchError(
                f"cannot listen for workers at {self._path} and on {address}: {error}. Set TMPDIR "
                "to a folder of a local disk, or name another interface."
            ) from error

    @property
    def port(self) -> int:
        """For PyTorch's own clients, as MASTER_PORT."""
        return self._server.port

    def key_count(self) -> int:
        """How many keys there are."""
        return self._server.key_count()

    def value(self, key: str) -> bytes | None:
        """What a worker has written there; None: nothing."""
        return self._server.value(key)

    def here(self) -> StoreAddress:
        """For processes of this host."""
        return StoreAddress(self._path, port=self.port)

    def elsewhere(self) -> StoreAddress:
        """For processes of other hosts."""
        return StoreAddress(None, self._address, self.port, self._token)

    def client(self, timeout: timedelta = _TIMEOUT) -> StoreClient:
        """For the launcher itself, where it takes part in a rendezvous. Imports torch."""
        from farandole.worker.store.client import StoreClient

        return StoreClient(self.here(), timeout)

    def close(self) -> None:
        self._server.close()

"""A store whose server is in this process: rank 0's, or the launcher's."""

from __future__ import annotations

import atexit
from datetime import timedelta
from pathlib import Path

from farandole.errors import LaunchError
from farandole.worker.store.address import StoreAddress, new_token
from farandole.worker.store.client import StoreClient
from farandole.worker.store.server import StoreServer

LOOPBACK = "127.0.0.1"
_SOCKET = "store.socket"
_TIMEOUT = timedelta(seconds=60)


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


class JobStore:
    """A launcher's: in the job's `folder`, and on a TCP port of `address`.

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

    def here(self) -> StoreAddress:
        """For processes of this host."""
        return StoreAddress(self._path, port=self.port)

    def elsewhere(self) -> StoreAddress:
        """For processes of other hosts."""
        return StoreAddress(None, self._address, self.port, self._token)

    def client(self, timeout: timedelta = _TIMEOUT) -> StoreClient:
        return StoreClient(self.here(), timeout)

    def close(self) -> None:
        self._server.close()


def _reached(host: str) -> str:
    return LOOPBACK if host == "0.0.0.0" else host

"""One client's connection to a cluster of parameter servers: joining, meeting, closing, traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
import zmq

from farandole.server.client.calls import Calls
from farandole.server.client.connections import Connections
from farandole.server.client.registrar_client import RegistrarClient
from farandole.server.client.requests import Requests
from farandole.server.client.simulated_link import LinkToServers
from farandole.server.protocol.seal import read_key
from farandole.system.activity import Activity


class Session:
    """Joins the cluster when it is made; leaves it by `close`, or at the end of `with`."""

    def __init__(
        self,
        address: str,
        key_file: str | Path,
        *,
        rank: int | None = None,
        timeout: float = 60.0,
        shared_memory: bool = True,
        late: bool = False,
        job: str = "",
        workers: int = 0,
        link: LinkToServers | None = None,
    ) -> None:
        key = read_key(Path(key_file))
        self._context: zmq.Context[Any] = zmq.Context()
        self._requests = Requests(shared_memory=shared_memory)
        self._registrar_client = RegistrarClient(
            self._context, key, address, rank, late=late, job=job, workers=workers
        )
        self.rank = rank
        self.job = job
        self._closed = False
        self._link = link
        try:
            number = self._registrar_client.join(timeout)
            self._connections = Connections(
                self._context,
                key,
                self._registrar_client,
                number,
                self._requests.arena,
                timeout,
                link,
            )
        # The context cannot be terminated while it has open sockets, so the registrar's client goes
        # first.
        except BaseException:
            self._registrar_client.close()
            self._requests.close()
            self._context.term()
            raise
        self._calls = Calls(self._connections, self._requests)

    @property
    def registrar_client(self) -> RegistrarClient:
        """The line to the registrar, which knows who lives."""
        return self._registrar_client

    def meet(self, name: str, payload: bytes) -> dict[int, bytes]:
        """Waits for all living workers; returns what each gave, by rank."""
        if self._link is None:
            return self._registrar_client.meet(name, payload, self._connections.timeout)
        arrived = self._link.meet(len(payload))
        given = self._registrar_client.meet(name, payload, self._connections.timeout)
        self._link.wait_for_meeting(arrived, sum(map(len, given.values())))
        return given

    @property
    def members(self) -> int:
        """How many workers take part."""
        return len(self._connections.members)

    @property
    def bytes_sent(self) -> int:
        return self._connections.bytes_sent - self.saved_key_bytes

    @property
    def saved_key_bytes(self) -> int:
        """Of lists of rows that were not sent, because the servers knew them already."""
        return self._connections.saved_key_bytes

    @property
    def bytes_received(self) -> int:
        return self._connections.bytes_received

    @property
    def waited_seconds(self) -> float:
        return self._connections.waited_seconds

    def show_waits(self, activity: Activity) -> None:
        """Tells `activity` from now on when a call waits for the servers."""
        self._connections.activity = activity

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that can be pushed from, and got into, without a copy on this side."""
        return self._requests.buffer(count, dtype)

    def close(self) -> None:
        """Leaves. What was pushed and is not acknowledged yet may not have arrived."""
        if not self._closed:
            self._closed = True
            self._connections.close()
            self._registrar_client.close()
            self._requests.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

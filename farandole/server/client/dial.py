"""A client's socket to one server, connected again after it was refused.

ZeroMQ connects again by itself when a connection breaks, but gives up for good when the other end
refuses the handshake: a stranger who had the port for a while would cut a worker off for ever.
"""

from __future__ import annotations

import contextlib
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from farandole.errors import UserError
from farandole.server.node.admission import ANOTHER_KEY, ANOTHER_VERSION, credentials
from farandole.server.protocol.handshake import VERSION
from farandole.server.protocol.sockets import is_readable, open_socket

_REFUSALS = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class Dial:
    """`socket` stays the same one. Raises `UserError` for what is no address."""

    def __init__(self, context: zmq.Context[Any], key: bytes, address: str) -> None:
        self.address = address
        self.socket = open_socket(context, zmq.DEALER)
        self.socket.plain_username, self.socket.plain_password = credentials(key, address)
        # Before it connects: the other end may refuse at once, and says so once.
        self._monitor = self.socket.get_monitor_socket(_REFUSALS)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"cannot connect to {address}: {error.strerror}. Addresses look like "
                "tcp://127.0.0.1:43210."
            ) from None

    def refusal(self) -> str | None:
        """Why the other end has refused the connection since the last call, if it has.

        Nothing can be sent then, before `again`.
        """
        why = None
        while is_readable(self._monitor):
            happened = recv_monitor_message(self._monitor)
            why = self._explain(int(happened["event"]), int(happened["value"]))
        return why

    def again(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has forgotten it already
            self.socket.disconnect(self.address)
        self.socket.connect(self.address)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def _explain(self, event: int, code: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and code == ANOTHER_KEY:
            return (
                f"the server at {self.address} has another job's key. Give both ends the same key "
                "file."
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and code == ANOTHER_VERSION:
            return (
                f"the server at {self.address} does not speak version {VERSION} of the protocol. "
                "Install the same farandole at both ends."
            )
        return (
            f"what answers at {self.address} is no parameter server, or one of another version of "
            "farandole. Install the same version at both ends."
        )

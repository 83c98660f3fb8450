"""Who may open a connection to a server's data port, decided before anything of it is kept.

A ZeroMQ socket without a mechanism takes messages of any number of frames from whoever connects,
and holds them until they are complete. So data ports use PLAIN. A connection begins with a
password. Until that is checked, ZeroMQ takes one frame of at most FRAME_BYTES from the connection,
for at most HANDSHAKE_SECONDS (sockets.py).

The password is derived from the job's key and the number of the port. It proves less than the
greeting that follows (handshake.py): it travels in the clear, so whoever can listen on the network
can repeat it at this port. That opens a connection, and nothing that comes on it is believed
without a seal. Whoever takes over the port of a dead server and hears the password can use it
nowhere else.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter
from typing import Any

import zmq

from farandole.server.protocol.handshake import VERSION

ANOTHER_KEY, ANOTHER_VERSION = 400, 500  # what the other end hears, as ZAP allows
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks, in every context
_USER = f"farandole {VERSION}"


def credentials(key: bytes, address: str) -> tuple[bytes, bytes]:
    """The user name and the password for the data port at `address`."""
    port = address.rpartition(":")[2]
    password = hmac.new(key, b"farandole data port " + port.encode(), "sha256").hexdigest()
    return _USER.encode(), password.encode()


class Admission:
    """Answers ZeroMQ's questions about new connections, in a thread that ends with `context`.

    `refused` counts connections that were not let in, by reason.
    """

    def __init__(self, context: zmq.Context[Any], key: bytes) -> None:
        self.refused: Counter[str] = Counter()
        self._key = key
        self._password = b""  # nobody is let in before the port's number is known
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP)
        self._thread = threading.Thread(target=self._work, name="admission", daemon=True)
        self._thread.start()

    def open(self, address: str) -> None:
        """From now on those who have the password for this address are let in."""
        _, self._password = credentials(self._key, address)

    def _work(self) -> None:
        try:
            while True:
                version, request, _, _, _, _, *said = self._socket.recv_multipart()
                code = self._judge(said)
                self._socket.send_multipart([version, request, str(code).encode(), b"", b"", b""])
        except zmq.ContextTerminated:
            self._socket.close()

    def _judge(self, said: list[bytes]) -> int:
        user, password = said if len(said) == 2 else (b"", b"")
        if (
            self._password
            # In constant time: the time of a plain comparison would tell how many characters are
            # right.
            and hmac.compare_digest(password, self._password)
            and user == _USER.encode()
        ):
            return 200
        is_older = user.startswith(b"farandole ") and user != _USER.encode()
        self.refused["unknown version" if is_older else "another key"] += 1
        return ANOTHER_VERSION if is_older else ANOTHER_KEY

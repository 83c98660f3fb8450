"""The control channel: how servers and clients talk to the registrar.

Few and small messages, so they can afford CURVE: encrypted, and both ends prove that they know the
job's key, from which their key pairs are derived. What is said is JSON, with one frame of bytes
beside it for meetings.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from farandole.errors import UserError
from farandole.server.protocol.sockets import cut, is_readable, joined, limit_strangers

BEAT_SECONDS = 0.5
_DOMAIN = "farandole"


def _secret(key: bytes, role: str) -> bytes:
    return z85.encode(hmac.digest(key, f"farandole control {role}".encode(), hashlib.sha256))


class _OneClientKey:
    """Lets in those whose key pair is derived from the job's key, and nobody else."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class ControlSocket:
    """The registrar's end, where all others come."""

    def __init__(self, key: bytes, bind: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        public = zmq.curve_public(_secret(key, "client"))
        self._authenticator.configure_curve_callback(_DOMAIN, _OneClientKey(public))
        self.socket = self.context.socket(zmq.ROUTER)
        secret = _secret(key, "registrar")
        self.socket.curve_secretkey = secret
        self.socket.curve_publickey = zmq.curve_public(secret)
        self.socket.curve_server = True
        self.socket.zap_domain = _DOMAIN.encode()
        self.socket.linger = 200
        limit_strangers(self.socket)
        self.socket.set_hwm(0)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"the registrar cannot listen on {bind}: {error.strerror}. End the process that "
                "does, or name another port; port 0 takes one that is free."
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, dict[str, Any], bytes] | None:
        """The next message that is there: from whom, what, and the bytes beside it."""
        while is_readable(self.socket):
            peer, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            said = _read(parts)
            if said is not None:
                return peer, *said
        return None

    def send(self, peer: bytes, message: dict[str, Any], payload: bytes = b"") -> None:
        self.socket.send_multipart([peer, *cut([json.dumps(message).encode(), payload])])

    def close(self) -> None:
        self.socket.close()
        self._authenticator.stop()
        self.context.term()


class ControlLine:
    """A server's or client's end."""

    def __init__(self, context: zmq.Context[Any], key: bytes, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        secret = _secret(key, "client")
        self.socket.curve_secretkey = secret
        self.socket.curve_publickey = zmq.curve_public(secret)
        self.socket.curve_serverkey = zmq.curve_public(_secret(key, "registrar"))
        self.socket.linger = 200  # a last word may still go out
        self.socket.set_hwm(0)
        limit_strangers(self.socket)
        self.socket.connect(address)

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        self.socket.send_multipart(list(cut([json.dumps(message).encode(), payload])))

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        while is_readable(self.socket):
            said = _read(self.socket.recv_multipart(zmq.NOBLOCK))
            if said is not None:
                return said
        return None

    def close(self) -> None:
        self.socket.close()


def _read(parts: list[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """None for what is not a message. Only holders of the key get here, so that is a mistake."""
    frames = joined([memoryview(part) for part in parts])
    if len(frames) != 2:
        return None
    try:
        message = json.loads(bytes(frames[0]))
    except (ValueError, RecursionError):
        return None
    return (message, bytes(frames[1])) if isinstance(message, dict) else None

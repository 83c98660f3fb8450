"""A store's server: one thread and one loop over all its connections, none of which can stall it.

    Unix socket in a private folder     the user's processes of this host, in our own language
    TCP port on loopback                PyTorch's own clients, if the kernel says that they are
                                        this user's
    TCP port of the host's address      our own clients with the job's token, and PyTorch's own
      (only with a token)               clients from hosts where somebody has shown the token

A connection that is not let in yet may send a few bytes and has a few seconds. One that waits for a
key is answered by whoever sets it; its time limit is the client's business, who hangs up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import threading
import time
from pathlib import Path

from farandole.worker.store.native import Greeting, Native
from farandole.worker.store.peer import Language, Peer
from farandole.worker.store.peer_user import can_tell, peer_user
from farandole.worker.store.protocol import ProtocolError
from farandole.worker.store.table import Table
from farandole.worker.store.torch_protocol import TorchProtocol
from farandole.worker.store.unix_path import short_path

_BACKLOG = 1024
_GREETING_SECONDS = 5.0
_MAX_GREETINGS = 256
_MAX_PEERS = 8192
_OWN_DESCRIPTORS = 256  # that are left to the rest of the process
_ACCEPTS_AT_ONCE = 16
_PAUSE_SECONDS = 0.05  # when the system has no descriptor left
_CLOSE_SECONDS = 10.0


class StoreServer:
    """Listens at `path`, and on TCP where a `host` is given. Raises `OSError` where it cannot.

    With a `token`, clients that hold it may come from other hosts. With `torch_clients`, PyTorch's
    own clients are let in on TCP as well, as the table above says.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        host: str | None = None,
        port: int = 0,
        token: bytes | None = None,
        torch_clients: bool = False,
    ) -> None:
        self.path = path
        self._token = token
        self._torch_clients = torch_clients
        self._table = Table()
        self._peers: set[Peer] = set()
        self._greetings: dict[Peer, float] = {}  # not let in yet, and until when; oldest first
        self._admitted: set[str] = set()  # addresses of hosts where somebody holds the token
        self._unfinished: list[Peer] = []
        self._max_peers = _descriptors()
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._closing = False
        self._process = os.getpid()
        self._woken, self._waker = socket.socketpair()
        try:
            if path is not None:
                self._listen_on_path(path)
            self.port = 0 if host is None else self._listen_on_port(host, port)
        except BaseException:
            self._close_all()
            raise
        for listener in self._listeners:
            self._register(listener, self._accept_here if _is_unix(listener) else self._accept_tcp)
        self._register(self._woken, lambda _: None)
        self._thread = threading.Thread(target=self._serve, name="farandole-store", daemon=True)
        self._thread.start()

    def key_count(self) -> int:
        """How many keys there are."""
        return len(self._table)

    def value(self, key: str) -> bytes | None:
        """For the process that serves it."""
        return self._table.get(key.encode())

    def close(self) -> None:
        """Ends all connections; those who wait get an error."""
        if self._closing or self._process != os.getpid():  # a fork has not the thread
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the loop has seen it already
            self._waker.send(b"x")
        self._thread.join(_CLOSE_SECONDS)

    def _listen_on_path(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        with short_path(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(_BACKLOG)

    def _listen_on_port(self, host: str, port: int) -> int:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        return int(listener.getsockname()[1])

    # The loop.

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, mask in self._selector.select(self._time_left()):
                    if type(key.data) is Peer:
                        self._attend(key.data, mask)
                    else:
                        key.data(key.fileobj)
                    while self._unfinished:
                        self._continue(self._unfinished.pop())
                self._end_slow_greetings()
        finally:
            self._close_all()

    def _attend(self, peer: Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                peer.send_rest()
            elif not peer.receive():
                self._drop(peer)
                return
            peer.read()
        except (OSError, ProtocolError):
            self._drop(peer)
        else:
            if bool(peer.outbox) != peer.writing:
                self._watch(peer)

    def _continue(self, peer: Peer) -> None:
        """Somebody else's request has sent it an answer."""
        if peer not in self._peers:
            return
        try:
            peer.read()
        except ProtocolError:
            self._drop(peer)
        else:
            if bool(peer.outbox) != peer.writing:
                self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """While answers wait to be sent, nothing more is read."""
        peer.writing = bool(peer.outbox)
        event = selectors.EVENT_WRITE if peer.writing else selectors.EVENT_READ
        self._selector.modify(peer.socket, event, peer)

    def _drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._greetings.pop(peer, None)
        peer.forget_wait()
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.socket)
        peer.socket.close()

    # Who comes.

    def _accept_here(self, listener: object) -> None:
        for connection in self._accepted(listener):
            self._add(connection, Native())

    def _accept_tcp(self, listener: object) -> None:
        for connection in self._accepted(listener):
            with contextlib.suppress(OSError):  # gone already: reading will tell
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greeting = Greeting(self._token, self._welcome, self._let_in_torch)
            peer = self._add(connection, greeting)
            self._greetings[peer] = time.monotonic() + _GREETING_SECONDS
            if len(self._greetings) > _MAX_GREETINGS:
                self._drop(next(iter(self._greetings)))

    def _accepted(self, listener: object) -> list[socket.socket]:
        assert isinstance(listener, socket.socket)
        found: list[socket.socket] = []
        try:
            for _ in range(_ACCEPTS_AT_ONCE):
                connection, _ = listener.accept()
                if len(self._peers) + len(found) >= self._max_peers:
                    connection.close()
                else:
                    connection.setblocking(False)
                    found.append(connection)
        except BlockingIOError:
            pass
        except OSError as error:  # the peer is gone already, or no descriptor is left for now
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_PAUSE_SECONDS)
        return found

    def _add(self, connection: socket.socket, language: Language) -> Peer:
        peer = Peer(connection, language, self._table, self._unfinished)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def _welcome(self, peer: Peer) -> None:
        del self._greetings[peer]
        with contextlib.suppress(OSError):
            self._admitted.add(peer.socket.getpeername()[0])

    def _let_in_torch(self, peer: Peer) -> None:
        """Raises `ProtocolError` for somebody who may not come in."""
        if not self._torch_clients or not self._is_ours(peer.socket):
            raise ProtocolError("not this user's, or from a host that is not part of the job")
        del self._greetings[peer]
        peer.language = TorchProtocol()

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            if connection.getpeername()[0] in self._admitted:
                return True
            return not can_tell() or peer_user(connection) == os.getuid()
        except OSError:
            return False

    def _time_left(self) -> float | None:
        for deadline in self._greetings.values():
            return max(0.0, deadline - time.monotonic())
        return None

    def _end_slow_greetings(self) -> None:
        if not self._greetings:
            return
        now = time.monotonic()
        for peer in [peer for peer, deadline in self._greetings.items() if deadline <= now]:
            self._drop(peer)

    def _register(self, listener: socket.socket, accept: object) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _close_all(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        for listener in (*self._listeners, self._woken, self._waker):
            listener.close()
        self._selector.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _is_unix(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX


def _descriptors() -> int:
    """How many connections there may be, so that the process can still open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_PEERS
    return min(_MAX_PEERS, max(soft - _OWN_DESCRIPTORS, soft // 2))

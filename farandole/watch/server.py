"""The server of `farandole watch`: one page and its events, on loopback, for whoever has the token.

Any page in the user's browser, and any user of this machine, can reach a port of loopback. So every
request must have the token, and must name this server as its host: a name that an attacker makes
point to 127.0.0.1 (DNS rebinding) is refused. No state is kept for a browser: each is sent the
newest state when it is ready for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import signal
from collections.abc import Callable

import click
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from farandole.errors import FarandoleError, UserError
from farandole.watch.source import WatchedFolder
from farandole.watch.state import POLICY, State, live_page, state_of

ADDRESS = "127.0.0.1"
POLL_SECONDS = 1.0
BEAT_SECONDS = 10.0  # a browser that has left is noticed when something is sent
END_SECONDS = 2.0
MOST_BROWSERS = 32
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Hub:
    """The newest state, and who waits for a newer one."""

    def __init__(self, folder: WatchedFolder) -> None:
        self.folder = folder
        self.browsers = 0
        self.ended = False
        self._problem = ""
        self._state: State | None = None
        self._changed = asyncio.Condition()

    async def state(self) -> State | None:
        if self._state is None:
            await self.look()
        return self._state

    async def look(self) -> None:
        """In a thread: files may be large, and on a slow disk."""
        try:
            found = await asyncio.to_thread(lambda: state_of(self.folder.look()))
        except (FarandoleError, OSError) as error:  # the page keeps what it has
            if str(error) != self._problem:
                click.echo(f"farandole: {error}", err=True)
            self._problem = str(error)
            return
        self._problem = ""
        if self._state is None or found.id != self._state.id:
            self._state = found
            await self.wake()

    async def watch(self) -> None:
        """While anybody is looking."""
        while not self.ended:
            if self.browsers:
                await self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, known: str, seconds: float) -> None:
        """For another state than the `known` one, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.ended or self._has_other(known))

    def _has_other(self, known: str) -> bool:
        return self._state is not None and self._state.id != known

    async def end(self, seconds: float) -> None:
        """Tells all browsers, and waits for them so long."""
        self.ended = True
        await self.wake()
        deadline = asyncio.get_running_loop().time() + seconds
        while self.browsers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)


class _Guarded(RequestHandler):
    """Whoever has no token, or calls this server by another name, gets nothing."""

    def initialize(self, hub: Hub, token: str, hosts: frozenset[str]) -> None:
        self.hub = hub
        self.token = token
        self.hosts = hosts

    def prepare(self) -> None:
        if self.request.host.lower() not in self.hosts:
            raise HTTPError(403)
        given = self.get_query_argument("token", "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise HTTPError(403)

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def write_error(self, status_code: int, **_: object) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code}: use the address that farandole watch has printed.\n")


class _NothingHandler(_Guarded):
    def get(self) -> None:
        raise HTTPError(404)


class _PageHandler(_Guarded):
    async def get(self) -> None:
        events = f"events?token={self.token}"
        try:
            body = await asyncio.to_thread(lambda: live_page(self.hub.folder.look(), events))
        except (FarandoleError, OSError) as error:
            self.set_status(503)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{error}\n")
            return
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(body)


class _EventsHandler(_Guarded):
    async def get(self) -> None:
        if self.hub.browsers >= MOST_BROWSERS:
            raise HTTPError(503)
        self.set_header("Content-Type", "text/event-stream")
        known = self.request.headers.get("Last-Event-ID", "")
        self.hub.browsers += 1
        try:
            await self._send_states(known)
        except StreamClosedError:
            pass  # the browser has left
        finally:
            self.hub.browsers -= 1

    async def _send_states(self, known: str) -> None:
        while not self.hub.ended:
            state = await self.hub.state()
            if state is not None and state.id != known:
                known = state.id
                self.write(state.event)
            else:
                self.write(": still here\n\n")
            await self.flush()
            await self.hub.wait(known, BEAT_SECONDS)
        self.write("event: end\ndata: {}\n\n")
        await self.flush()


async def serve(folder: WatchedFolder, port: int, ready: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. `ready` is told the address, with its token.

    Raises `UserError` for a port that is taken, and for a folder that cannot be read now.
    """
    state_of(folder.look())
    try:
        sockets = bind_sockets(port, ADDRESS)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port {port}: {error}. Give another one, or leave it out: then a free one is taken."
        ) from None
    number = sockets[0].getsockname()[1]
    hub, token = Hub(folder), secrets.token_urlsafe(32)
    given = {
        "hub": hub,
        "token": token,
        "hosts": frozenset({f"{ADDRESS}:{number}", f"localhost:{number}"}),
    }
    server = HTTPServer(
        Application(
            [("/", _PageHandler, given), ("/events", _EventsHandler, given)],
            default_handler_class=_NothingHandler,
            default_handler_args=given,
            log_function=lambda handler: None,  # addresses have the token in them
        )
    )
    server.add_sockets(sockets)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number_ in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_, stopped.set)
    watching = asyncio.create_task(hub.watch())
    try:
        ready(f"http://{ADDRESS}:{number}/?token={token}")
        await stopped.wait()
    finally:
        server.stop()
        watching.cancel()
        await hub.end(END_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.close_all_connections(), END_SECONDS)

"""A Chromium without a window, driven by its DevTools protocol.

Chromium listens on loopback, at a port of its own choice, and is asked over a WebSocket. Everything
has a time limit, and the process is ended whatever happens.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

PATIENCE_SECONDS = 200.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars", "--mute-audio"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--window-size=1200,900"),
)


class Browser:
    """One tab. `errors` are the errors of the page: exceptions, its console, its policy."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: WebSocketClientConnection) -> None:
        self._loop = loop
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command, and returns its answer; what the page says meanwhile is kept."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, parameters), PATIENCE_SECONDS)
        )

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.write_message(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        while True:
            text = await self._socket.read_message()
            assert text is not None, "the browser has gone"
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.errors.append(str([argument.get("value") for argument in said["args"]]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(said["entry"]["text"])

    def open(self, address: str) -> None:
        self.errors.clear()
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && document.querySelector('h1') !== null")

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true in the page."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}; {self.errors}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        pressed = {"button": "left", "clickCount": 1} if buttons or kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=buttons, **pressed)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element of that kind."""
        x, y = self.place(selector)
        self.mouse("mousePressed", x, y, 1)
        self.mouse("mouseReleased", x, y)

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A point of an element, in the window, scrolled there."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        return box[0] + across * box[2], box[1] + down * box[3]

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def running_browser(program: str = "chromium") -> Iterator[Browser]:
    """A fresh one, with a profile of its own."""
    profile = Path(tempfile.mkdtemp(prefix="fd-chromium-"))
    loop = asyncio.new_event_loop()
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        socket = loop.run_until_complete(_connect(profile, process))
        try:
            yield Browser(loop, socket)
        finally:
            socket.close()
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE_SECONDS)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        shutil.rmtree(profile, ignore_errors=True)


async def _connect(profile: Path, process: subprocess.Popen[bytes]) -> WebSocketClientConnection:
    """To the one tab, by the port that the browser writes into its profile."""
    from tornado.httpclient import AsyncHTTPClient

    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (file.is_file() and file.read_text().strip()):
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, "chromium did not start"
        await asyncio.sleep(0.05)
    port = file.read_text().split()[0]
    while True:
        answer = await AsyncHTTPClient().fetch(
            f"http://127.0.0.1:{port}/json/list", request_timeout=PATIENCE_SECONDS
        )
        tabs = [tab for tab in json.loads(answer.body) if tab["type"] == "page"]
        if tabs:
            address = tabs[0]["webSocketDebuggerUrl"]
            return await websocket_connect(address, max_message_size=100 * 2**20)
        assert time.monotonic() < deadline, "chromium has no tab"
        await asyncio.sleep(0.05)

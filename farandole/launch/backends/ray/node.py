"""The actor on each node. It runs one program, the agent, and passes bytes to and from it.

    launcher          bridge            actor (placed and watched by Ray)      node
    ┌─────────┐ pipe ┌────────┐ calls  ┌───────────┐ pipe  ┌───────┐
    │ Channel │ ◀──▶ │ bridge │ ◀────▶ │ AgentHost │ ◀───▶ │ agent │ ──▶ workers
    └─────────┘      └────────┘        └───────────┘       └───────┘

Arguments and results of its methods are strings, numbers and bytes. When the actor ends, however
that happens, the standard input of the agent ends, and with it the agent and its workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

OUTPUT, ERRORS, END, NOTHING = "output", "errors", "end", "nothing"

Pieces = queue.Queue[tuple[str, bytes]]

_CHUNK = 2**18
_MOST_CHUNKS = 64  # that wait for the bridge; then the agent waits
_READ_SECONDS = 5.0


class AgentHost:
    """`threads` is the number of cores that each worker of the node may use."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._pieces: Pieces = queue.Queue(_MOST_CHUNKS)

    def host_name(self) -> str:
        return socket.gethostname()

    def start(self, command: Sequence[str]) -> None:
        """Perhaps once more, when the last one has ended. Raises `OSError` where it cannot."""
        # What is left of the last one is nobody's.
        pieces = self._pieces = queue.Queue(_MOST_CHUNKS)
        # Ray sets this to the cores of the whole actor.
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        self._process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        collect = threading.Thread(target=_collect, args=(self._process, pieces), daemon=True)
        collect.start()

    def write(self, data: bytes) -> None:
        """To the agent's standard input. Nothing: its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; `read` tells
            if not data:
                self._process.stdin.close()
            while data:
                data = data[self._process.stdin.write(data) :]

    def read(self) -> tuple[str, bytes]:
        """The next piece of what the agent writes, or its exit code. Waits for a few seconds."""
        try:
            return self._pieces.get(timeout=_READ_SECONDS)
        except queue.Empty:
            return NOTHING, b""


def _collect(process: subprocess.Popen[bytes], pieces: Pieces) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    streams = ((OUTPUT, process.stdout, pieces), (ERRORS, process.stderr, pieces))
    threads = [threading.Thread(target=_pass_on, args=each, daemon=True) for each in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pieces.put((END, str(process.wait()).encode()))


def _pass_on(kind: str, stream: IO[bytes], pieces: Pieces) -> None:
    while data := stream.read(_CHUNK):
        pieces.put((kind, data))

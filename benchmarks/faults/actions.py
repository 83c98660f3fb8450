"""What goes wrong while a job runs: signals to processes, and strangers at every port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence

import psutil

from faults.place import Place

_PAUSE_SECONDS = 1.0
_FLOOD = 100
_FRAME_BYTES = 1_500_000_000
_SENT_BYTES = 300 * 2**20  # of the frame: enough to see whether somebody keeps it
_SEND_SECONDS = 3.0


def strike(action: str, targets: Sequence[psutil.Process]) -> None:
    """Sends the signals that `action` names to each of `targets`, with a pause between two."""
    for count, name in enumerate(action.split(", ")):
        time.sleep(_PAUSE_SECONDS if count else 0.0)
        for process in targets:
            process.send_signal(signal.Signals[name])


@contextlib.contextmanager
def strangers(action: str, place: Place) -> Iterator[None]:
    """Connects to everything that listens in the job, and stays connected inside of the context."""
    with contextlib.ExitStack() as stack:
        for family, address in sorted(_listening(place), key=str):
            for _ in range(_FLOOD if action == "a flood" else 1):
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    stranger.settimeout(1.0)
                    stranger.connect(address)
                    _say(action, stranger)
        yield


def _listening(place: Place) -> set[tuple[int, tuple[str, int] | str]]:
    found: set[tuple[int, tuple[str, int] | str]] = set()
    for process in place.processes():
        with contextlib.suppress(psutil.Error, OSError):
            for one in process.net_connections(kind="all"):
                if one.family == socket.AF_UNIX and one.type == socket.SOCK_STREAM and one.laddr:
                    name = str(one.laddr)
                    found.add((socket.AF_UNIX, f"\0{name[1:]}" if name[0] == "@" else name))
                elif one.status == psutil.CONN_LISTEN:
                    found.add((int(one.family), (one.laddr.ip, one.laddr.port)))
    return found


def _say(action: str, stranger: socket.socket) -> None:
    if action == "garbage":
        stranger.sendall(os.urandom(2**16))
    elif action == "1.5 GB frames":
        for header in (struct.pack("<Q", _FRAME_BYTES), struct.pack(">BQ", 2, _FRAME_BYTES)):
            stranger.sendall(header)
        part, end = bytes(2**20), time.monotonic() + _SEND_SECONDS
        for _ in range(_SENT_BYTES // len(part)):
            stranger.sendall(part)
            if time.monotonic() > end:
                break

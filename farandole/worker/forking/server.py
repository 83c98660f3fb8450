"""A process that has imported torch, and forks workers that need not import it again.

    launcher              fork server                      worker
    ┌────────┐  request   ┌──────────────┐ fork, fork again ┌──────────────────┐
    │ Forks  │ ─────────▶ │ torch, …     │ ───────────────▶ │ python script.py │
    │        │ ◀───────── │ one thread   │                  └──────────────────┘
    └────────┘  its id    └──────────────┘
         ▲                                                           │
         └────────────── its parent, by whom it is reaped ───────────┘

It has one thread and has touched no device, so that forking it is safe. A worker's first parent
ends at once; the worker is then adopted by the launcher, which waits for it, ends it and with
which it ends, as if it had started it itself. `forked` says what else makes it like a fresh one.

A launcher may be forked too, as the lanes of a race are. It then has a fork server of its own:
one more fork, from it, before it has any thread.

Started by `forks`: python -m farandole.worker.forking.server DESCRIPTOR ROOM-FOR-A-COMMAND-LINE.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from farandole.environment import FORKS, PRELOAD, RESERVED, TRIAL
from farandole.system.orphans import end_with_parent
from farandole.worker.forking import forked
from farandole.worker.forking.afresh import Beginning, execute
from farandole.worker.forking.leaving import run_and_leave
from farandole.worker.forking.preloaded import Preloaded

LENGTH = struct.Struct(">I")  # of the request that follows
STARTED = struct.Struct(">i")  # the id of the process
NOBODY = 0
PRELOADED = (
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "farandole.train",
    "farandole.train.engines.pipelined",
    "farandole.launch.launcher",
)
_ADOPTION_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """What to run, in JSON. Its three standard streams travel beside it.

    `shown` are the variables by which others find the process; one that `serves` gets a fork server
    of its own, and may have other variables than those under which torch was imported.
    """

    command: Sequence[str]
    variables: dict[str, str]
    folder: str
    launcher: int  # the process that adopts it
    shown: dict[str, str]
    serves: bool = False

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    reserved_bytes = len(os.environ.pop(RESERVED, ""))
    more = os.environ.pop(PRELOAD, "").split(",")
    imported_under = dict(os.environ)
    before = frozenset(sys.modules)
    for name in PRELOADED:
        importlib.import_module(name)
    for name in filter(None, more):
        # A module that fails here fails in the script too, where its error is seen.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # `fork` copies the calling thread alone. A lock that another thread held would stay locked for
    # ever in the child, and a device's context does not survive in a copy.
    if threading.active_count() > 1 or sys.modules["torch"].cuda.is_initialized():
        sys.exit("with another thread, or a device in use, forking is not safe")
    gc.freeze()  # what is here stays: no process need look through it
    modules = [name for name in sys.modules if "." not in name and not name.endswith("main__")]

    connection.sendall(STARTED.pack(os.getpid()))  # ready
    request = _serve(connection)
    while request is not None:
        checked = None if request.serves else imported_under
        if not (
            forked.can_run(request.command, checked, modules)
            and forked.show_variables(RESERVED, reserved_bytes, request.shown)
        ):
            execute(request.command, request.variables)
        forked.show_command(request.command)
        if not request.serves:
            beginning = Beginning(request.command, request.variables, request.folder)
            Preloaded.hide(before, request.variables, beginning)
        elif (inner := _fork_server()) is not None:
            request = _serve(inner)
            continue
        if TRIAL in request.variables:  # of which there are many, and short ones
            run_and_leave(request.command)
        forked.run(request.command)
        return


def _serve(connection: socket.socket) -> Request | None:
    """Returns in each process that is forked, with what it is to run; in this one, at the end."""
    while True:
        header, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        if len(header) < LENGTH.size:
            return None
        content = b""
        (length,) = LENGTH.unpack(header)
        while len(content) < length:
            found = connection.recv(length - len(content))
            if not found:
                return None
            content += found
        # Two forks: the process in between ends, so that the worker becomes an orphan, and the
        # kernel gives it to the nearest subreaper above, the launcher.
        between = os.fork()
        if not between:
            request = Request(**json.loads(content))
            _fork_worker(connection, request, streams)
            return request
        os.waitpid(between, 0)
        for descriptor in streams:
            os.close(descriptor)


def _fork_worker(connection: socket.socket, request: Request, streams: Sequence[int]) -> None:
    """Returns in the worker alone, when its launcher is its parent."""
    between = os.getpid()
    if os.fork():
        os._exit(0)
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    # Only now is the launcher the parent, and the signal at a parent's death is tied to that one.
    # If the launcher died before this line, `adopted` is false, and the worker ends by itself.
    end_with_parent()
    adopted = os.getppid() == request.launcher
    connection.sendall(STARTED.pack(os.getpid() if adopted else NOBODY))
    connection.close()
    if not adopted:  # the launcher is gone
        os._exit(1)
    # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which ends its
    # workers.
    os.setsid()
    forked.forget_the_server(request.folder, request.variables)
    forked.take_streams(streams)


def _fork_server() -> socket.socket | None:
    """In the new server, its connection. None in this process, which has a variable for its end."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if server:
        theirs.close()
        os.environ[FORKS] = f"{ours.detach()}:{server}"
        return None
    ours.close()
    end_with_parent()
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    forked.take_streams(nothing)
    return theirs


if __name__ == "__main__":
    main()

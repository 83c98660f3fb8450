"""The launcher's side of the fork server: asks it for workers, and looks after them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from farandole.environment import FORK, FORKS, RESERVED
from farandole.system.orphans import adopt_orphans, tied_to_this_process
from farandole.worker.forking.server import LENGTH, NOBODY, STARTED, Request

FORK_SERVER = "farandole.worker.forking.server"
FEWEST_ON_ONE_HOST = 3
"""So many workers start sooner when they are forked: see benchmarks/startup_workers.py."""
FEWEST_ON_EACH_HOST = 2
"""The same on each of several hosts: see benchmarks/startup_hosts.py."""
_RESERVED_BYTES = 256  # for the variables that a worker shows
_COMMAND_BYTES = 1024
_IMPORT_SECONDS = 300.0  # how long the first worker may take: torch is imported before it
_POLL_SECONDS = 0.01
_WAIT_SECONDS = 0.1
_KILLED_SECONDS = 5.0
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")


class ForkError(OSError):
    """The fork server is gone; processes can be started in another way."""


class Forked:
    """A process that was forked, and is this process's child. As far as needed, like a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                # By its own id, never -1: another part of this process may wait for children of its
                # own.
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # whoever killed it has seen its end
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """One fork server, started or inherited."""

    def __init__(
        self, connection: socket.socket, server: Forked | subprocess.Popen[bytes], *, ready: bool
    ) -> None:
        self._connection = connection
        self._server = server
        self._ready = ready
        self._import_until = time.monotonic() + _IMPORT_SECONDS
        connection.settimeout(_IMPORT_SECONDS)

    @classmethod
    def begin(cls, environment: Mapping[str, str]) -> Forks | None:
        """Starts one under the variables that its workers will have, and does not wait for it.

        None where it cannot be: on systems other than Linux, with accelerators, whose drivers may
        not be shared with forked processes, and where the user says FARANDOLE_FORK=0.
        """
        if not _is_possible() or not adopt_orphans():
            return None
        ours, theirs = socket.socketpair()
        room = "." * _COMMAND_BYTES
        with theirs:
            server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "farandole.worker.forking.server",
                    str(theirs.fileno()),
                    room,
                ],
                # The reserved one comes last: of two with the same name the system shows both.
                env={**environment, RESERVED: "." * _RESERVED_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=tied_to_this_process(),
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, server, ready=False)

    @classmethod
    def inherited(cls, environ: MutableMapping[str, str] = os.environ) -> Forks | None:
        """The one that came with this process, once; its variable is not for others."""
        known = environ.pop(FORKS, None)
        if known is None or not adopt_orphans():
            return None
        descriptor, server = map(int, known.split(":"))
        return cls(socket.socket(fileno=descriptor), Forked(server), ready=True)

    def wait(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Until one that was begun is ready. False: it has ended instead, as where torch is not, or
        the wait was stopped, or took too long."""
        while (ready := self.look(_WAIT_SECONDS)) is None and not is_stopped():
            pass
        return bool(ready)

    def look(self, seconds: float = 0.0) -> bool | None:
        """Whether it is ready. None: perhaps later, for after `seconds` it still imports."""
        if self._ready or self._connection.fileno() < 0:
            return self._ready
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        if not poller.poll(seconds * 1000):
            return None if time.monotonic() < self._import_until else False
        with contextlib.suppress(OSError):
            said = self._connection.recv(STARTED.size, socket.MSG_WAITALL)
            self._ready = len(said) == STARTED.size
        return self._ready

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        streams: Sequence[int] = (0, 1, 2),
        shown: Mapping[str, str] | None = None,
        serves: bool = False,
    ) -> Forked:
        """A process in a session of its own that ends with this one. Raises `ForkError`.

        `shown` are variables by which others must be able to find it.
        """
        if not self.wait():
            self.close()
            raise ForkError("the fork server did not start")
        request = Request(
            tuple(command),
            dict(environment),
            str(Path.cwd()),
            os.getpid(),
            dict(shown or {}),
            serves,
        ).encoded()
        try:
            # The streams go with the header, in one message: descriptors that travelled alone could
            # be lost between two reads of the other end.
            socket.send_fds(self._connection, [LENGTH.pack(len(request))], list(streams))
            self._connection.sendall(request)
            answer = self._connection.recv(STARTED.size, socket.MSG_WAITALL)
        except OSError as error:
            self.close()  # or it might fork the process later, beside another that takes its place
            raise ForkError(f"the fork server does not answer: {error}") from error
        pid = STARTED.unpack(answer)[0] if len(answer) == STARTED.size else NOBODY
        if pid == NOBODY:
            raise ForkError("the fork server has ended, or this process cannot adopt its children")
        return Forked(pid)

    def close(self) -> None:
        """Ends the server; workers live on."""
        # The server ends when it reads the end of its connection.
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_POLL_SECONDS)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._server.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system itself holds it (state D)
            self._server.wait(_KILLED_SECONDS)


def _is_possible() -> bool:
    return (
        sys.platform.startswith("linux")
        and os.environ.get(FORK) != "0"
        and not any(Path(path).exists() for path in _ACCELERATORS)
    )

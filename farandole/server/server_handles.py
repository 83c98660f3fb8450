"""A running server, in a process or a thread: whether it has ended, and how to end it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from farandole.server.node.service import Service
from farandole.system.orphans import tied_to_this_process


class ServerHandle(Protocol):
    """A server, however it runs."""

    def ended(self) -> str | None:
        """How it ended, if it has."""

    def stop(self) -> None:
        """Asks it to end."""

    def end(self) -> None:
        """Waits for that, and sees to it."""


class ServerProcess:
    """A server in a process of its own, which ends with this one."""

    def __init__(self, command: Sequence[str]) -> None:
        # A session of its own: Ctrl-C is for the launcher, which ends its workers first.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # The kernel ends the server when this process dies, also by SIGKILL: no server is left
            # behind.
            preexec_fn=tied_to_this_process(),
        )

    def ended(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def end(self) -> None:
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ServerThread:
    """A server in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self._stopped = threading.Event()
        self._error: BaseException | None = None

        def work() -> None:
            try:
                service.run(self._stopped.is_set)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="parameter server", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread.is_alive() else f"ended: {self._error!r}"

    def stop(self) -> None:
        self._stopped.set()

    def end(self) -> None:
        self._thread.join(5)


def server_command(
    registrar: str, key_file: Path, bind: str, functions: Sequence[str], mark: str = ""
) -> list[str]:
    """What to run for one server."""
    command = [sys.executable, "-m", "farandole.server", registrar, str(key_file), "--bind", bind]
    for module in functions:
        command += ["--functions", module]
    return [*command, "--mark", mark] if mark else command

"""One worker on another host, as the launcher sees it: what its agent reports of it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO, Protocol

from farandole.launch.backends.remote.activity_reports import ActivityReport
from farandole.launch.backends.remote.frames import OUTPUT
from farandole.launch.backends.remote.orders import End
from farandole.launch.watches.progress import Progress

UNREACHABLE = 255
"""The exit code of a worker whose host could not be reached, was refused, or was lost."""


class AgentLink(Protocol):
    """The way to a worker's agent."""

    host: str

    def signal(self, number: int, which: signal.Signals) -> None: ...

    def stop(self, number: int) -> None: ...

    def kill(self, number: int) -> None: ...


class RemoteWorker:
    """Its output and its last error come into files of this host, or to the terminal."""

    pid: int | None = None  # its process is on the other host
    stop_margin_seconds = 15.0

    def __init__(
        self, number: int, agent: AgentLink, files: tuple[Path, Path] | None, error: Path
    ) -> None:
        self.number = number
        self.host = agent.host
        self.advice = ""
        self._agent = agent
        self._files = files  # for output and errors; None: the launcher's own streams
        self._error_file = error
        self._exit_code: int | None = None
        self._reported: tuple[ActivityReport, float] | None = None  # the last, and when it came

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; `UNREACHABLE` when the host was lost."""
        return self._exit_code

    def send(self, number: signal.Signals) -> None:
        self._agent.signal(self.number, number)

    def progress(self, path: Path) -> Progress:
        """As its agent reported it; `path` is of no use there."""
        if self._reported is None:
            return Progress()
        report, received = self._reported
        return report.progress(received)

    def stop(self) -> None:
        """Its agent sees to it that it ends."""
        self._agent.stop(self.number)

    def kill(self) -> None:
        self._agent.kill(self.number)

    # For the connection, from its own thread.

    def take_output(self, kind: bytes, content: bytes) -> None:
        if self._files is None:
            stream = sys.stdout.buffer if kind == OUTPUT else sys.stderr.buffer
            _write(stream, content)
            return
        with self._files[kind != OUTPUT].open("ab") as file:
            file.write(content)

    def take_report(self, report: ActivityReport) -> None:
        self._reported = report, time.monotonic()

    def note_end(self, end: End) -> None:
        # The file before the code: whoever sees the end reads the file.
        if end.error is not None:
            self._error_file.write_text(end.error)
        self._exit_code = end.exit_code

    def note_lost(self, advice: str) -> None:
        self.advice = advice
        self._exit_code = UNREACHABLE


def _write(stream: BinaryIO, content: bytes) -> None:
    try:
        stream.write(content)
        stream.flush()
    except (OSError, ValueError):  # nobody reads any more; the job goes on
        return

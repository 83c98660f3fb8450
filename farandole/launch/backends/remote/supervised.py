"""A worker as its agent sees it: a process, the pipes it writes to, and when it is to be killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from farandole.launch.backends.remote.frames import ERRORS, OUTPUT
from farandole.launch.forks import Forked, ForkError, Forks
from farandole.system.orphans import tied_to_this_process
from farandole.system.process_state import is_stopped

CHUNK_BYTES = 2**16
_MOST_OF_THE_REST = 2**22  # somebody outside of the job may hold a pipe open, and write on


class Process(Protocol):
    """A `Popen` or a `Forked`."""

    pid: int

    def poll(self) -> int | None: ...


class Supervised:
    """Leads a group of its own, so that its children are signalled with it."""

    def __init__(self, process: Process, pipes: dict[int, bytes], error_file: Path) -> None:
        self._process = process
        self._kill_at = float("inf")
        self.pipes = pipes  # that still are open, and which frames their contents become
        self.error_file = error_file

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        """To the worker alone, not to its children."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def stop(self, grace_seconds: float) -> None:
        """Asks it and its children to end. One that is stopped would not hear of it, and has
        nothing to save: it is killed at once."""
        if self._kill_at < float("inf"):
            return  # it was asked before, and its time runs
        self._kill_at = time.monotonic() + grace_seconds
        stopped = self.poll() is None and is_stopped(self._process.pid)
        self._send_to_group(signal.SIGKILL if stopped else signal.SIGTERM)

    def kill(self) -> None:
        self._send_to_group(signal.SIGKILL)

    def kill_if_late(self) -> None:
        """Its grace period is over, or it was suspended meanwhile."""
        asked = self._kill_at < float("inf")
        if asked and (time.monotonic() > self._kill_at or is_stopped(self._process.pid)):
            self.kill()

    def read(self, descriptor: int) -> bytes:
        """What the pipe holds; at its end nothing, and then it is closed."""
        found = os.read(descriptor, CHUNK_BYTES)
        if not found:
            os.close(descriptor)
            del self.pipes[descriptor]
        return found

    def read_rest(self) -> dict[bytes, bytes]:
        """Call it when the process has ended. Waits for nothing, and closes the pipes."""
        rest: dict[bytes, bytes] = {}
        for descriptor, kind in list(self.pipes.items()):
            found = bytearray()
            while len(found) < _MOST_OF_THE_REST and select.select([descriptor], [], [], 0)[0]:
                if not (more := self.read(descriptor)):
                    break
                found += more
            rest[kind] = bytes(found)
        self.close()
        return rest

    def close(self) -> None:
        for descriptor in self.pipes:
            os.close(descriptor)
        self.pipes.clear()

    def _send_to_group(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def start_supervised(
    command: Sequence[str],
    variables: Mapping[str, str],
    error_file: Path,
    *,
    forks: Forks | None,
    shown: Mapping[str, str],
    in_one_stream: bool,
) -> Supervised:
    """Forked where there are `forks`, or else started afresh. Raises `OSError` where it cannot."""
    with contextlib.ExitStack() as ends:
        pipes, writers = {}, []
        for kind in (OUTPUT,) if in_one_stream else (OUTPUT, ERRORS):
            reader, writer = os.pipe()
            ends.callback(os.close, writer)
            pipes[reader] = kind
            writers.append(writer)
        nothing = os.open(os.devnull, os.O_RDONLY)
        ends.callback(os.close, nothing)
        streams = [nothing, writers[0], writers[-1]]
        try:
            process = _start(command, variables, streams, forks, shown)
        except BaseException:
            for reader in pipes:
                os.close(reader)
            raise
    return Supervised(process, pipes, error_file)


def _start(
    command: Sequence[str],
    variables: Mapping[str, str],
    streams: Sequence[int],
    forks: Forks | None,
    shown: Mapping[str, str],
) -> Forked | subprocess.Popen[bytes]:
    if forks is not None:
        with contextlib.suppress(ForkError):  # a fresh process does as well
            return forks.start(command, variables, streams=streams, shown=shown)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command,
        env=variables,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=tied_to_this_process(),
    )

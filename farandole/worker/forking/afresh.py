"""A forked worker that begins again as a fresh process, when only that is right.

A script may set variables that libraries read when they are loaded, and import torch after that.
In a forked worker torch was loaded before. The worker then executes the interpreter after all, and
the script starts again at its first line. That is right only if nobody can tell that its first
lines ran twice. So until that import everything is noted that is seen from outside: what was
written or read, files that were made or removed, processes, threads, connections. After any of
that the worker goes on, and `preloaded` says what comes too late.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Python's audit events for what is seen from outside of a process. Those for output are missing:
# the kernel counts what was written.
_EFFECTS = (
    "builtins.input",
    "ctypes.dlsym",
    "fcntl.",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.lockf",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pty.spawn",
    "shutil.",
    "socket.",
    "sqlite3.",
    "subprocess.Popen",
    "tempfile.",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_RESTORED = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")  # what Python ignores, and a new program does not


class Beginning:
    """Made just before a script starts: knows how it was started, and what it has done since."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        self._command = command
        self._variables = variables
        self._folder = folder
        self._seen = False
        self._over = False
        self._ignored = _ignored_signals()
        self._written = _bytes_written()
        self._input = getattr(getattr(sys.stdin, "buffer", None), "raw", None)
        # An audit hook cannot be removed; `end` makes it do nothing.
        sys.addaudithook(self._note)

    def end(self) -> None:
        """The libraries are in use; from now on there is no way back."""
        self._over = True

    def can_start_again(self) -> bool:
        """Whether nobody can tell that the script has run so far."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        return not (
            self._over
            or self._seen
            or getattr(self._input, "was_read", True)
            # A thread may do anything later; what it has seen so far cannot be taken back.
            or threading.active_count() > 1
            or self._written is None
            or self._written != _bytes_written()
        )

    def start_again(self) -> None:
        """Does not return, unless the interpreter is gone."""
        # What a process hands on through `execve`: the folder, ignored signals and open files. The
        # first two are restored here; Python opens files so that they are closed.
        os.chdir(self._folder)
        for number in _ignored_signals() - self._ignored:
            signal.signal(number, signal.SIG_DFL)
        execute(self._command, self._variables)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._over or self._seen:
            return
        if event == "open":
            path, _, flags = arguments
            self._seen = bool(flags & _WRITING) and not _is_byte_code(path)
        elif event.startswith(_EFFECTS):
            self._seen = not (arguments and _is_byte_code(arguments[0]))


def execute(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Becomes a fresh process."""
    for name in _RESTORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(command[0], list(command), dict(variables))
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error}\n")
        os._exit(127)


def _is_byte_code(path: object) -> bool:
    """Python writes it by itself when it imports a module."""
    return isinstance(path, str) and (".pyc" in path or path.endswith("__pycache__"))


def _bytes_written() -> int | None:
    """By this process, into whatever it was; None where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["wchar"])
    except (OSError, KeyError, ValueError):
        return None


def _ignored_signals() -> set[signal.Signals]:
    numbers = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
    return {number for number in numbers if signal.getsignal(number) == signal.SIG_IGN}

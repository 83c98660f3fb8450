"""Starts Python scripts in processes that are forked from a warm one, not in fresh interpreters.

Most of what a test's process does is import torch: 2 to 4 seconds of a core, more than a thousand
times. `WarmStarts` takes the place of the one function by which `subprocess` starts a program. If
the program is a Python script or module, `WarmStarts` asks a process that has torch imported
(`warm_server`) for a fork. To whoever starts it the new process is a child as any other. It has
the variables, folder, streams, descriptors and session that it was given, also in `/proc`. Programs
that are no script, and scripts that need an interpreter with other settings, are started as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ORIGINAL: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
LENGTH = struct.Struct(">I")  # of the request that follows
STARTED = struct.Struct(">i")  # the id of the process
NOBODY = 0
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # <sys/prctl.h>
_ANSWER_SECONDS = 120.0  # torch is imported before the first
_TIE = "tied_to_this_process.<locals>.tie"
_ARGUMENTS = 22  # that are the same from Python 3.11 on
_KEPT_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}  # by Python itself, in every process


@dataclass(frozen=True)
class Request:
    """What to start, in JSON. Descriptors travel beside it: three streams, then those to keep."""

    command: Sequence[str]
    variables: dict[str, str]
    folder: str
    kept: Sequence[int]  # the numbers of the other descriptors
    session: bool  # of its own
    tied: bool  # ends with its parent
    ignored: Sequence[int]  # signals
    parent: int

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class WarmStarts:
    """Takes the place of `subprocess`' own way to start a program, in this process alone."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._connection: socket.socket | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Meanwhile scripts are started so."""
        with _fork_exec_is(self._fork_exec):
            yield

    def begin(self) -> None:
        """The warm process starts, if it does not run yet."""
        with self._lock:
            self._connected()

    def install(self) -> None:
        """From now on scripts are started so."""
        subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]

    def _fork_exec(self, *arguments: Any) -> int:
        asked = _understand(arguments) if os.getpid() == self._owner else None
        pid = NOBODY if asked is None else self._ask(*asked)
        return pid if pid != NOBODY else int(_ORIGINAL(*arguments))

    def _ask(self, request: Request, descriptors: Sequence[int]) -> int:
        content = request.encoded()
        with self._lock, _adopting_orphans():
            try:
                connection = self._connected()
                socket.send_fds(connection, [LENGTH.pack(len(content))], list(descriptors))
                connection.sendall(content)
                answer = connection.recv(STARTED.size, socket.MSG_WAITALL)
            except OSError:
                return NOBODY
        return int(STARTED.unpack(answer)[0]) if len(answer) == STARTED.size else NOBODY

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.settimeout(_ANSWER_SECONDS)
        return self._connection


@contextlib.contextmanager
def fresh_starts() -> Iterator[None]:
    """Meanwhile every script gets an interpreter of its own."""
    with _fork_exec_is(_ORIGINAL):
        yield


@contextlib.contextmanager
def _fork_exec_is(function: Callable[..., int]) -> Iterator[None]:
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = function  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


def _understand(arguments: Sequence[Any]) -> tuple[Request, Sequence[int]] | None:
    """What `subprocess` asks for, where a fork can do the same."""
    if len(arguments) < _ARGUMENTS:
        return None
    words, _, close_fds, keep, cwd, env, stdin, _, _, stdout, _, stderr = arguments[:12]
    _, error_pipe, _, session, *rest, before = arguments[12:_ARGUMENTS]
    pairs = env if env is not None else [name + b"=" + os.environb[name] for name in os.environb]
    variables = dict(os.fsdecode(pair).split("=", 1) for pair in pairs)
    command = [os.fsdecode(word) for word in words]
    command = spelled_out(command, variables.get("PATH"))
    tied = getattr(before, "__qualname__", None) == _TIE
    plain = rest == [-1, None, None, None, -1]  # process group, gid, groups, uid, umask
    if not (close_fds and plain and (before is None or tied) and is_script(command, cwd)):
        return None
    kept = [number for number in keep if number != error_pipe]
    streams = [
        wanted if wanted != -1 else own for own, wanted in enumerate((stdin, stdout, stderr))
    ]
    request = Request(
        command,
        variables,
        str(Path.cwd()) if cwd is None else os.path.abspath(os.fsdecode(cwd)),  # noqa: PTH100
        kept,
        bool(session),
        tied and threading.current_thread() is threading.main_thread(),
        sorted(ignored_signals()),
        os.getpid(),
    )
    return request, [*streams, *kept]


def spelled_out(command: Sequence[str], path: str | None) -> list[str]:
    """With this environment's interpreter in front, if it is named otherwise (`python`) or left to
    the system (`farandole`)."""
    program, *arguments = command
    name = Path(program).name
    if name == "farandole" or name.startswith("python"):
        found = shutil.which(program, path=path)
        if found is not None and Path(found).parent == Path(sys.executable).parent:
            module = ["-m", "farandole"] if name == "farandole" else []
            return [sys.executable, *module, *arguments]
    return list(command)


def is_script(command: Sequence[str], cwd: Any) -> bool:
    """Whether it runs a script or a module in this interpreter."""
    program, *arguments = command
    if program != sys.executable or not arguments:
        return False
    if arguments[0] == "-m":
        return len(arguments) > 1
    script = Path("." if cwd is None else os.fsdecode(cwd), arguments[0])
    return script.suffix == ".py" and script.is_file()


def ignored_signals() -> set[int]:
    numbers = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
    ignored = {number for number in numbers if signal.getsignal(number) == signal.SIG_IGN}
    return {int(number) for number in ignored - _KEPT_IGNORED}


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """This process is the parent of its descendants whose parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)

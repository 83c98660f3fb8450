"""Forks what programs other than Python start: ranks of mpirun and srun, workers on ssh's hosts.

    mpirun, srun, an agent     warm server                         keeper
    ┌────────────┐             ┌──────────────┐   fork             ┌────────┐ fork ┌───────────┐
    │            │             │ torch, …     │ ─────────────────▶ │        │ ───▶ │ script.py │
    └────────────┘             └──────────────┘                    └────────┘      └───────────┘
          │ starts                    ▲                                 ▲
    ┌────────────┐   request          │     signals, and how it ended   │
    │ stand-in   │ ───────────────────┴─────────────────────────────────┘
    └────────────┘

The one that was started cannot be replaced by a fork of another process, so it stands in for it
(`stand_in/sitecustomize.py`): it passes its signals on and ends with the same status. If it is
killed outright, the keeper kills the script. The script has the streams, variables and folder of
its stand-in, and is in its namespaces, but its process id is another, and its parent is the keeper.
So this is for jobs that train, not for tests of who ends with whom.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping
from json import loads
from pathlib import Path

from tests.support.warm_starts import LENGTH, NOBODY, STARTED, Request, is_script

FOLDER = Path(__file__).parent / "stand_in"
VARIABLE = "WARM_STARTS"
_DESCRIPTORS = 3
_NAMESPACES = 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # of net, IPC, names and mounts
_CREDENTIALS = struct.Struct("3i")


def variables_for(path: Path, pythonpath: str) -> dict[str, str]:
    """With these, Python stands in for processes forked by the server that listens at `path`."""
    return {VARIABLE: str(path), "PYTHONPATH": f"{FOLDER}{os.pathsep}{pythonpath}"}


def without(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of a process that does its work itself."""
    return {name: value for name, value in variables.items() if name != VARIABLE}


def fork_keeper(listener: socket.socket) -> tuple[int, tuple[Request, list[int]] | None]:
    """In the server, the keeper's id. In the new script's process also what it is to run, and its
    three streams; it is in the namespaces of its stand-in then."""
    line, _ = listener.accept()
    keeper = os.fork()
    if keeper:
        line.close()
        return keeper, None
    listener.close()
    asked = _read(line)
    if asked is None:
        with contextlib.suppress(OSError):
            line.sendall(STARTED.pack(NOBODY))
        os._exit(1)
    _, streams = asked
    os.setsid()
    _enter_namespaces(line)
    script = os.fork()
    if not script:
        line.close()
        return 0, asked
    for descriptor in streams:
        os.close(descriptor)
    os._exit(_keep(line, script))


def _read(line: socket.socket) -> tuple[Request, list[int]] | None:
    header, streams, _, _ = socket.recv_fds(line, LENGTH.size, _DESCRIPTORS)
    if len(header) < LENGTH.size or len(streams) < _DESCRIPTORS:
        return None
    (length,) = LENGTH.unpack(header)
    content = line.recv(length, socket.MSG_WAITALL)
    request = Request(**loads(content)) if len(content) == length else None
    if request is None or not is_script(request.command, request.folder):
        return None
    return request, list(streams)


def _enter_namespaces(line: socket.socket) -> None:
    """Those of the stand-in, where they differ: an emulated host's."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(found)
    if all(_namespace(pid, kind) == _namespace(os.getpid(), kind) for kind in ("net", "mnt")):
        return
    descriptor = os.pidfd_open(pid)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NAMESPACES) != 0:
        os._exit(1)
    os.close(descriptor)


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115


def _keep(line: socket.socket, script: int) -> int:
    """Until the script has ended, or its stand-in is gone."""
    line.sendall(STARTED.pack(script))
    end = os.pidfd_open(script)
    poller = select.poll()
    for descriptor in (line.fileno(), end):
        poller.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll()}
    if end not in ready:
        leads = os.getpgid(script) == script
        (os.killpg if leads else os.kill)(script, signal.SIGKILL)
    _, status = os.waitpid(script, 0)
    with contextlib.suppress(OSError):
        line.sendall(STARTED.pack(os.waitstatus_to_exitcode(status)))
    return 0

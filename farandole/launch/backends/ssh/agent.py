"""Looks after one worker on another host: started there by ssh, as a module of its own.

    launcher                        ssh                 agent                   worker
    ┌────────────────┐   order, then nothing; its end   ┌──────────┐  starts   ┌────────┐
    │ RemoteWorker   │ ───────────────────────────────▶ │          │ ────────▶ │ python │
    │                │ ◀─────────────────────────────── │          │ ◀──────── │        │
    └────────────────┘   frames: output, then the end   └──────────┘  output   └────────┘

The order comes on standard input, a line of JSON: so no variable of the user is on a command line
for others to read. Standard input then stays open, and its end means that the worker is to stop:
the launcher wants that, or is gone, or the network is. In every case no process is left here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from farandole.environment import ELASTIC_WORKER, LAUNCHER
from farandole.errors import CommError
from farandole.system.cores import fair_share
from farandole.system.job_processes import IDENTITY, kill_leftovers
from farandole.system.orphans import tied_to_this_process
from farandole.system.owned_folders import OwnedFolder
from farandole.system.process_state import is_stopped
from farandole.system.watchdog import Watchdog
from farandole.worker.grace import DEFAULT_SECONDS
from farandole.worker.network import interface_towards
from farandole.worker.store.address import launcher_store
from farandole.worker.store.protocol import COUNT

OUTPUT, ERRORS, END = b"o", b"e", b"x"
HEADER = struct.Struct(">cI")  # which of these, and how many bytes follow
WARNING = b"u"  # on standard input: SIGUSR1 for the worker
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0
_CHUNK = 2**16
_INTRODUCTION_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """What to run, where, and with which variables beside those of the host."""

    command: tuple[str, ...]
    folder: str
    variables: dict[str, str]
    in_one_stream: bool = False  # its errors among its output, so that their order stays
    grace_seconds: float = DEFAULT_SECONDS  # between SIGTERM and SIGKILL

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def run_worker(order: Order) -> None:
    """Runs the worker to its end, or to that of standard input, and tells how it ended."""
    folder = OwnedFolder("worker")
    watchdog = Watchdog(variables=_identification(order), folders=[folder.path])
    try:
        error_file = folder.path / "error.json"
        try:
            worker = _start(order, error_file)
        except OSError as error:
            _send(ERRORS, f"cannot start {order.command[0]!r} in {order.folder}: {error}\n")
            _send(END, json.dumps({"exit_code": 127, "error": None}))
            return
        try:
            _pass_on_until_the_end(worker)
        finally:
            # In a `finally`: SIGTERM and SIGHUP raise SystemExit in the loop, and the worker must
            # not outlive it.
            _reap(worker, order)
        _pass_on_the_rest(worker)
        error_text = error_file.read_text() if error_file.exists() else None
        _send(END, json.dumps({"exit_code": worker.returncode, "error": error_text}))
    finally:
        folder.close()
        watchdog.close()


def _identification(order: Order) -> dict[str, str]:
    """The variables by which the worker's processes are found, apart from other workers' here."""
    variable = ELASTIC_WORKER if ELASTIC_WORKER in order.variables else "RANK"
    return {name: order.variables[name] for name in (IDENTITY, variable)}


def _start(order: Order, error_file: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **order.variables}
    defaults = {
        "OMP_NUM_THREADS": str(fair_share(int(environment["LOCAL_WORLD_SIZE"]))),
        "PYTHONUNBUFFERED": "1",
    }
    _introduce(environment)
    interface = interface_towards(environment["MASTER_ADDR"])
    if interface is not None:
        # Else gloo takes the address of the host's own name, which is often a loopback one.
        defaults["GLOO_SOCKET_IFNAME"] = interface
    own = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    return subprocess.Popen(
        order.command,
        cwd=order.folder,
        env={**defaults, **environment, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if order.in_one_stream else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=tied_to_this_process(),
    )


def _introduce(environment: Mapping[str, str]) -> None:
    """Shows the job's token to the launcher's store, which then lets in PyTorch's own clients from
    this host: a script that forms its process group itself has no token to show."""
    store = launcher_store(environment)
    if store is not None:
        with contextlib.suppress(OSError, CommError):  # the worker will say so
            link = store.connect(_INTRODUCTION_SECONDS)
            try:
                link.ask(COUNT, (), _INTRODUCTION_SECONDS)  # the answer says that it was let in
            finally:
                link.close()


def _pass_on_until_the_end(worker: subprocess.Popen[bytes]) -> None:
    """Returns when the worker has ended, or when the launcher wants no more of it."""
    streams = {**_streams(worker), sys.stdin.fileno(): b""}
    while worker.poll() is None:
        for descriptor in select.select(list(streams), [], [], _POLL_SECONDS)[0]:
            found = os.read(descriptor, _CHUNK)
            kind = streams[descriptor]
            # Two ways to learn that the launcher is gone: nobody reads what is sent, or standard
            # input ends.
            if (kind and not _send(kind, found)) or (not kind and not found):
                return
            if not kind and WARNING in found and worker.poll() is None:
                worker.send_signal(signal.SIGUSR1)
            if not found:
                del streams[descriptor]


def _reap(worker: subprocess.Popen[bytes], order: Order) -> None:
    """Asks the worker to end, if it still runs, and then leaves nothing of it.

    A stopped one would not hear of it: it is killed at once.
    """
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL if is_stopped(worker.pid) else signal.SIGTERM)
    streams = _streams(worker)
    deadline = time.monotonic() + order.grace_seconds
    while worker.poll() is None and time.monotonic() < deadline:
        # Its output is read on, or it might wait for ever for room to write in.
        for descriptor in select.select(list(streams), [], [], _POLL_SECONDS)[0]:
            found = os.read(descriptor, _CHUNK)
            _send(streams[descriptor], found)
            if not found:
                del streams[descriptor]
    if worker.poll() is None:
        worker.kill()
        worker.wait(_PATIENCE_SECONDS)
    (_, identity), (variable, number) = _identification(order).items()
    left = kill_leftovers(identity, int(number), variable)
    psutil.wait_procs(left, timeout=_PATIENCE_SECONDS)


def _pass_on_the_rest(worker: subprocess.Popen[bytes]) -> None:
    """What is left in the pipes; not more, for somebody outside the job may hold them open."""
    for descriptor, kind in _streams(worker).items():
        while select.select([descriptor], [], [], 0)[0]:
            found = os.read(descriptor, _CHUNK)
            if not found:
                break
            _send(kind, found)


def _streams(worker: subprocess.Popen[bytes]) -> dict[int, bytes]:
    assert worker.stdout is not None
    streams = {worker.stdout.fileno(): OUTPUT}
    if worker.stderr is not None:
        streams[worker.stderr.fileno()] = ERRORS
    return streams


def _send(kind: bytes, content: bytes | str) -> bool:
    """Whether anybody is there to read it."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    rest = HEADER.pack(kind, len(data)) + data if data else b""
    try:
        while rest:
            rest = rest[os.write(sys.stdout.fileno(), rest) :]
    except OSError:
        return False
    return True


def read_frame(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """The next frame of an agent; None at the end, also in the middle of a frame."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    kind, length = HEADER.unpack(header)
    content = stream.read(length)
    return (kind, content) if len(content) == length else None


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    said = b""
    while not said.endswith(b"\n"):  # not by `readline`, which would keep what follows to itself
        found = os.read(sys.stdin.fileno(), _CHUNK)
        if not found:
            sys.exit("the launcher went before it said what to run")
        said += found
    asked = json.loads(said)
    order = Order(tuple(asked["command"]), asked["folder"], asked["variables"])
    rest = {name: asked[name] for name in ("in_one_stream", "grace_seconds")}
    run_worker(replace(order, **rest))


if __name__ == "__main__":
    _main()

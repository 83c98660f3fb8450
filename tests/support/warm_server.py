"""warm_server.py DESCRIPTOR LISTENER ROOM: has torch imported, and forks others for `warm_starts`.

    a test, or a launcher      this process                        what it has started
    ┌────────────┐  request    ┌──────────────┐ fork, fork again   ┌──────────────────┐
    │ subprocess │ ──────────▶ │ torch, …     │ ─────────────────▶ │ python script.py │
    │            │ ◀────────── │ one thread   │                    └──────────────────┘
    └────────────┘  its id     └──────────────┘

It works as `farandole.worker.forking` does, for any process instead of a job's workers. The first
parent of the new process ends at once; the kernel then gives the process to the one that asked.
That needs the server to be a descendant of the one that asks. So a launcher, which starts others
itself, gets a server of its own: one more fork, before the launcher has any thread.

Other programs, as mpirun, ask by the LISTENER; see `stand_ins`.

Modules that were imported here are hidden until a script imports them. The library's own are not.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from json import loads
from pathlib import Path

from farandole.system.orphans import end_with_parent
from farandole.worker.forking import forked
from farandole.worker.forking.afresh import Beginning, execute
from farandole.worker.forking.leaving import run_and_leave
from farandole.worker.forking.preloaded import Preloaded
from tests.support.stand_ins import fork_keeper, without
from tests.support.warm_starts import (
    LENGTH,
    NOBODY,
    STARTED,
    Request,
    WarmStarts,
    ignored_signals,
)

MODULES = (
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "sklearn.datasets",
    "farandole.train",
    "farandole.train.engines.pipelined",
    "farandole.launch.launcher",
    "farandole.launch.policies.elastic.policy",
    "farandole.cli",
    "farandole.server.node.service",
    "farandole.sync.server.base",
    "farandole.horovod.torch",
)
# What starts further processes as its work: modules, scripts of tests, and a folder of scripts.
LAUNCHERS = ("farandole", "torch.distributed.run")
LAUNCHER_SCRIPT = "launcher.py"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Read by the interpreter or by a library before any script; numbers of threads can be set later.
READ_EARLY = re.compile(
    r"PYTHON(?!UNBUFFERED$|PATH$)|LD_|LC_|LANG|MALLOC_|GLIBC_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|BLIS_|"
    r"VECLIB_|NUMEXPR_|DNNL_|ONEDNN_|ATEN_|NPY_|TORCH_(?!NCCL_)|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH_"
)
THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the one that torch heeds first
ADOPTION_SECONDS = 60.0
DESCRIPTORS = 64  # at most
HIGH = 512  # above all descriptors that a process may be given by number


def main() -> None:
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    imported_under = dict(os.environ)
    before = frozenset(sys.modules)
    for name in MODULES:
        if find_spec(name.split(".")[0]) is not None:
            importlib.import_module(name)
    _forget_names_of_parts()
    gc.freeze()  # else each process looks through all of torch once more when it ends
    known = {name for name in sys.modules if "." not in name}

    request = _serve(connection, listener)
    while request is not None:
        if (
            _differing(request.variables, imported_under)
            or not _take_path(request, imported_under, known)
            or not _show(request.variables)
        ):
            execute(request.command, without(request.variables))
        forked.show_command(request.command)
        if _starts_others(request.command) and (inner := _fork_server()) is not None:
            request = _serve(inner)
            continue
        _set_threads(request.variables)
        beginning = Beginning(request.command, request.variables, request.folder)
        Preloaded.hide(before, request.variables, beginning)
        run_and_leave(request.command)  # tests of the end of a process are `fresh`
    os._exit(0)  # a server ends as those that it has forked


def _forget_names_of_parts() -> None:
    """Some extension modules, as SciPy's, are known by the last part of their names too, by which
    nobody can import them. A launcher's own fork server would take these for modules that a fresh
    process finds elsewhere, and start a fresh interpreter for every worker of three and more."""
    for name in [name for name in sys.modules if "." not in name and name != "__main__"]:
        if not forked.would_be_imported(name):
            del sys.modules[name]


def _set_threads(variables: Mapping[str, str]) -> None:
    numbers = [variables[name] for name in THREADS if name in variables]
    if numbers and numbers[0].isdecimal():
        sys.modules["torch"].set_num_threads(int(numbers[0]))


def _differing(variables: Mapping[str, str], imported_under: Mapping[str, str]) -> bool:
    names = {name for name in {*variables, *imported_under} if READ_EARLY.match(name)}
    return any(variables.get(name) != imported_under.get(name) for name in names - {*THREADS})


def _take_path(request: Request, imported_under: Mapping[str, str], known: set[str]) -> bool:
    """Where modules are looked for. False: another would be found than the one that is here."""
    _, first, *_ = request.command
    own, theirs = (_folders(said.get("PYTHONPATH")) for said in (imported_under, request.variables))
    folder = str(Path.cwd() if first == "-m" else Path(first).resolve().parent)
    sys.path[:] = [folder, *theirs, *(path for path in sys.path[1:] if path not in own)]
    named = {
        entry.name.removesuffix(".py")
        for path in [folder, *theirs]
        if path not in own and Path(path).is_dir()
        for entry in os.scandir(path)
    }
    return not named & known


def _folders(text: str | None) -> list[str]:
    return [path for path in (text or "").split(os.pathsep) if path]


def _show(variables: Mapping[str, str]) -> bool:
    """Makes the system show `variables` as those that this process was started with, in the room
    that these had. By them the processes of a job are found, and those of a test."""
    start, end = forked.stat_numbers(50, 51)
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in variables.items())
    if len(block) > end - start:
        return False
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
    return True


def _starts_others(command: Sequence[str]) -> bool:
    _, first, *rest = command
    if first == "-m":
        return rest[0] in LAUNCHERS
    script = Path(first).resolve()
    return script.name == LAUNCHER_SCRIPT or script.is_relative_to(BENCHMARKS)


def _serve(connection: socket.socket, listener: socket.socket | None = None) -> Request | None:
    """Returns in each process that is forked, with what it is to run; in this one, at the end."""
    keepers: set[int] = set()
    while True:
        if listener is not None and not _is_ready(connection, listener):
            keeper, asked = fork_keeper(listener)
            if asked is not None:
                connection.close()
                _become(*asked)
                return asked[0]
            keepers.add(keeper)
            keepers -= {each for each in keepers if os.waitpid(each, os.WNOHANG)[0]}
            continue
        header, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, DESCRIPTORS)
        if len(header) < LENGTH.size:
            return None
        content = b""
        (length,) = LENGTH.unpack(header)
        while len(content) < length:
            found = connection.recv(length - len(content))
            if not found:
                return None
            content += found
        between = os.fork()
        if not between:
            request = Request(**loads(content))
            if listener is not None:
                listener.close()
            _begin(connection, request, descriptors)
            return request
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_ready(connection: socket.socket, listener: socket.socket) -> bool:
    """Waits for either. False: somebody asks by the listener."""
    ready, _, _ = select.select([connection, listener], [], [])
    return connection in ready


def _begin(connection: socket.socket, request: Request, descriptors: Sequence[int]) -> None:
    """Returns in the new process alone, when the one that asked for it is its parent."""
    between = os.getpid()
    if os.fork():
        os._exit(0)
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    if request.tied:
        end_with_parent()
    adopted = os.getppid() == request.parent
    connection.sendall(STARTED.pack(os.getpid() if adopted else NOBODY))
    connection.close()
    if not adopted:
        os._exit(1)
    _become(request, descriptors)


def _become(request: Request, descriptors: Sequence[int]) -> None:
    """All that can be given to a process that runs already."""
    if request.session:
        os.setsid()
    for number in ignored_signals() - {*request.ignored}:  # by whoever has started the server
        signal.signal(number, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    forked.forget_the_server(request.folder, request.variables)
    high = [_moved(descriptor) for descriptor in descriptors]
    forked.take_streams(high[:3])
    for number, descriptor in zip(request.kept, high[3:], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _moved(descriptor: int) -> int:
    """Out of the way of those that have a number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(descriptor)
    return moved


def _fork_server() -> socket.socket | None:
    """In the new server, its connection. None in this process, which asks it from now on."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        WarmStarts(lambda: ours).install()
        return None
    ours.close()
    os.setsid()  # Ctrl-C is for the launcher
    end_with_parent()
    _show({})  # it belongs to no test and to no job
    forked.show_command(["warm"])
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    forked.take_streams(nothing)
    return theirs


if __name__ == "__main__":
    main()

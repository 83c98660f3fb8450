"""What a process that was forked from the fork server does to be like one that was started afresh.

It has a session, a folder, variables, streams and arguments of its own, a `__main__` of its own,
and random numbers of its own. What cannot be made so is not attempted: then it executes the
interpreter after all. That is the case when the command is no Python script or module of this
interpreter, when a variable differs that may be read at import, or when the script would have
imported another module of the same name.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import io
import multiprocessing.process
import os
import re
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.environment import PREFIX

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Read when they are needed, not when a module is imported. All others may be, for all we know.
_READ_LATE = re.compile(
    rf"{PREFIX}|TORCHELASTIC_|HOROVOD_|MASTER_(ADDR|PORT)$|((LOCAL|ROLE|GROUP)_)?(RANK|WORLD_SIZE)$|"
    r"ROLE_NAME$|GLOO_|NCCL_|TORCH_NCCL_|CUDA_VISIBLE_DEVICES$|PYTHONUNBUFFERED$|PWD$|OLDPWD$|_$"
)


class _Input(io.FileIO):
    """Standard input, which knows whether it was read."""

    was_read = False

    def readinto(self, buffer: Buffer, /) -> int | None:
        self.was_read = True
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.was_read = True
        return super().readall()


def take_streams(descriptors: Sequence[int]) -> None:
    """Standard input, output and errors are these from now on, opened as the interpreter does."""
    for number, descriptor in enumerate(descriptors):
        # `dup2` also makes the descriptor one that programs started from here inherit, as standard
        # streams must be.
        os.dup2(descriptor, number)
        os.close(descriptor)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = _open_stream(number, name, old.encoding, old.errors, unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _open_stream(
    number: int, name: str, encoding: str, errors: str, unbuffered: bool
) -> io.TextIOWrapper:
    reading = number == 0
    direct = unbuffered and not reading
    raw = (_Input if reading else io.FileIO)(number, "r" if reading else "w", closefd=False)
    raw.name = f"<{name}>"
    buffer = raw if direct else (io.BufferedReader if reading else io.BufferedWriter)(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding,
        errors,
        newline="\n",
        line_buffering=not direct and not reading and (raw.isatty() or number == 2),
        write_through=direct,
    )
    stream.mode = "r" if reading else "w"  # type: ignore[misc]
    return stream


def forget_the_server(folder: str, variables: Mapping[str, str]) -> None:
    """Nothing of the process that this one was forked from is to be seen or shared."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # to be found again, by the new variables
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    multiprocessing.process.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
    # Else all workers would draw the same. Python's own generator is seeded anew by `os.fork`.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def show_variables(reserved: str, size: int, variables: Mapping[str, str]) -> bool:
    """Makes the system show `variables` as this process's own, in place of a `reserved` one.

    What it shows are the bytes that the process was started with, wherever the variables are now;
    and by these the processes of a job are found. False: there is no room for them.
    """
    start, end = stat_numbers(50, 51)
    block = ctypes.string_at(start, end - start)
    mark = f"{reserved}=".encode()
    at = block.find(mark)
    shown = b"".join(os.fsencode(f"{name}={value}\0") for name, value in variables.items())
    rest = size + len(mark) - len(shown)
    if at < 0 or rest < len(mark):
        return False
    # Nobody else reads or writes these bytes: `os.environ` and the C library have copies, and this
    # process has one thread. What is left of the reserved room stays reserved, for a process forked
    # from here.
    ctypes.memmove(start + at, shown + mark + b"." * (rest - len(mark)), size + len(mark))
    return True


def show_command(command: Sequence[str]) -> None:
    """Makes `ps` show `command`, in the room that the server's own command line has.

    The system reads up to the first zero where the last byte is none.
    """
    start, end = stat_numbers(48, 49)
    text = os.fsencode(shlex.join(command))[: end - start - 2]
    ctypes.memmove(start, text.ljust(end - start - 1, b"\0") + b".", end - start)


def stat_numbers(*fields: int) -> tuple[int, ...]:
    """As `man 5 proc` counts them; the second is a name that may hold anything."""
    found = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return tuple(int(found[field - 3]) for field in fields)


def can_run(
    command: Sequence[str], imported_under: Mapping[str, str] | None, modules: Sequence[str]
) -> bool:
    """Whether `command` runs here as it would in a fresh process. None: whatever the variables."""
    if not is_script(command) or (imported_under is not None and _differing(imported_under)):
        return False
    _, first, *_ = command
    folder = Path.cwd() if first == "-m" else Path(first).resolve().parent
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)
    return all(would_be_imported(name) for name in modules)


def is_script(command: Sequence[str]) -> bool:
    """Whether it runs a script or a module in this interpreter."""
    program, *arguments = command
    if program != sys.executable or not arguments:
        return False
    script = arguments[0]
    return script == "-m" or (script.endswith(".py") and Path(script).is_file())


def _differing(imported_under: Mapping[str, str]) -> bool:
    names = {name for name in {*os.environ, *imported_under} if not _READ_LATE.match(name)}
    return any(os.environ.get(name) != imported_under.get(name) for name in names)


def would_be_imported(name: str) -> bool:
    """Whether the module of this name is the one that an import would find now."""
    known = sys.modules[name].__spec__
    if known is None or not known.has_location:
        return True
    if known.name != name:  # a part of a package that also has a short name, as some of SciPy's
        return True
    for finder in sys.meta_path:
        found = finder.find_spec(name, None)
        if found is not None:
            return found.origin == known.origin
    return False


def run(command: Sequence[str]) -> None:
    """What the interpreter does with these arguments. Ends as it would."""
    _, *arguments = command
    sys.orig_argv = list(command)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as `multiprocessing` has it
    try:
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            _run_script(main, arguments)
    except SystemExit:
        raise  # the interpreter knows what to do
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        # Without the frames of this file: a traceback begins in the script, as in a fresh process.
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt) and arguments[0] != "-m":
            _end_by_interrupt()
        raise SystemExit(1) from None


def _end_by_interrupt() -> None:
    """Dies of SIGINT once all is done that is done at the end: as the interpreter does where it
    runs a script itself, and does not where it runs a module (`-m`), as it does here."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _run_script(main: types.ModuleType, arguments: Sequence[str]) -> None:
    path = str(Path(arguments[0]).absolute())
    sys.argv = list(arguments)
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

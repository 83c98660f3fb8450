"""Runs Open MPI's mpirun to its end, and leaves no rank behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from farandole.environment import LAUNCHER
from farandole.errors import UserError
from farandole.launch.backends.mpi.one_host import one_host_variables
from farandole.launch.messages import tell
from farandole.system.orphans import tied_to_this_process
from farandole.worker.signals import exit_code_of, signals_noted, warnings_passed_on

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_KILLED_SECONDS = 5.0
_VERSION_SECONDS = 60.0


@dataclass(frozen=True)
class End:
    """How mpirun ended."""

    exit_code: int
    stopped_by: str | None = None  # the signal that we were stopped with


def require_mpi4py(option: str) -> None:
    """Raises `UserError` naming the `option` that needs it, and how to get it."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UserError(f"{option} needs mpi4py: pip install mpi4py, or leave it out.")


def require(option: str, instead: str) -> str:
    """The path of Open MPI's mpirun. Raises `UserError` naming the `option` that needs it, and what
    to do `instead` with another mpirun."""
    found = shutil.which("mpirun")
    if found is None:
        raise UserError(
            f"{option} needs mpirun, and there is none on the PATH: apt install openmpi-bin, "
            "or leave it out."
        )
    asked = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS
    )
    if "Open MPI" not in asked.stdout:
        said = (asked.stdout.strip() or "it does not say which it is").splitlines()[0]
        raise UserError(
            f"{option} starts Open MPI's mpirun, and {found} is another ({said}). {instead}"
        )
    return found


def command(mpirun: str, ranks: int, words: Sequence[str]) -> list[str]:
    """`words` on so many ranks of this host."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        *(mpirun, "-q", *root, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"),
        # Ranks of one host talk through shared memory. Without this they would also listen on
        # every network that the host has.
        *("--mca", "btl", "^tcp"),
        *words,
    ]


def run(words: Sequence[str], environment: Mapping[str, str]) -> End:
    """Runs to the end; no rank is left then, whether it ends by itself or is stopped.

    In a session of its own: Ctrl-C reaches us alone, and we stop mpirun in order.
    """
    ours = {LAUNCHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    if not sys.stdout.isatty():
        ours["TERM"] = "dumb"  # mpirun shows its ranks a terminal even when it writes to none
    started: list[subprocess.Popen[bytes]] = []
    pass_on = partial(_send_to, started)  # mpirun passes SIGUSR1 on to its ranks
    with signals_noted() as received, warnings_passed_on(pass_on):
        process = subprocess.Popen(
            words,
            env={**os.environ, **ours, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
        started.append(process)
        while process.poll() is None and not received:
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # mpirun then ends its ranks
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it: see `end_with_launcher`
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_SECONDS)
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return End(code if code >= 0 else 128 - code, received[0] if received else None)


def run_ranks(words: Sequence[str], variables: Mapping[str, str], *, one_host: bool) -> int:
    """Runs to the end, says by which signal it was stopped, and returns the exit code."""
    # mpirun marks each piece of a line that an unbuffered Python writes. It shows its ranks a
    # terminal, so that lines come at once anyway.
    buffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": ""}
    end = run(words, {**variables, **buffered, **(one_host_variables() if one_host else {})})
    if end.stopped_by is None:
        return end.exit_code
    tell(f"stopped by {end.stopped_by}")
    return exit_code_of(end.stopped_by)


def _send_to(started: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in started:
        process.send_signal(number)

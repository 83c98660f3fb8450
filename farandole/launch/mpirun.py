"""Starts the ranks by Open MPI's mpirun, so that MPI, gloo and ours run in the same processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.environment import LAUNCHER
from farandole.errors import UserError
from farandole.system.orphans import tied_to_this_process
from farandole.worker.signals import signals_noted

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class End:
    """How mpirun ended."""

    exit_code: int
    stopped_by: str | None = None  # the signal that we were stopped with


def require() -> str:
    """The path of mpirun. Raises `UserError` naming what to install."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UserError("--against mpi needs mpi4py: pip install mpi4py, or leave mpi out.")
    found = shutil.which("mpirun")
    if found is None:
        raise UserError(
            "--against mpi needs mpirun, and there is none on the PATH: apt install openmpi-bin, "
            "or leave mpi out."
        )
    asked = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
    if "Open MPI" not in asked.stdout:
        said = (asked.stdout.strip() or "it does not say which it is").splitlines()[0]
        raise UserError(
            f"--against mpi starts Open MPI's mpirun, and {found} is another ({said}). Start it "
            "yourself: mpirun -n 4 farandole bench comm --here …"
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
    with signals_noted() as received:
        process = subprocess.Popen(
            words,
            env={**os.environ, **ours, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
        while process.poll() is None and not received:
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # mpirun then ends its ranks
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it: see `end_with_launcher`
                process.wait()
    code = process.returncode
    return End(code if code >= 0 else 128 - code, received[0] if received else None)

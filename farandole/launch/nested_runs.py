"""`farandole run` as a process of another command: a lane of a race, a trial of a study.

The command starts it in a session of its own, follows what it writes, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from farandole.environment import PRELOAD, STARTED
from farandole.launch.forks import Forked, ForkError, Forks
from farandole.launch.job_directory import worker_defaults
from farandole.launch.outcome_file import OutcomeRecord
from farandole.system.orphans import tied_to_this_process

RunProcess = Forked | subprocess.Popen[bytes]

PATIENCE_SECONDS = 10.0
"""Beyond its grace: how long a run that was told to stop may take."""


class WarmProcesses:
    """Processes that have imported torch, from which all runs are forked.

    One for each number of workers: the cores are divided by it, and libraries of threads read their
    share when they are loaded.
    """

    def __init__(self) -> None:
        self._servers: dict[int, Forks] = {}

    def begin(
        self, workers: Collection[int], *, alone: bool = True, modules: Sequence[str] = ()
    ) -> None:
        """Starts them side by side, and does not wait for them.

        `alone`: no run has workers on other hosts. `modules` are imported beside torch.
        """
        more = {PRELOAD: ",".join(modules)} if modules else {}
        for count in set(filter(None, workers)) - set(self._servers):
            variables = {**os.environ, **worker_defaults(count, alone=alone), **more}
            server = Forks.begin(variables)
            if server is not None:
                self._servers[count] = server

    def prepare(
        self, workers: Collection[int], *, alone: bool = True, modules: Sequence[str] = ()
    ) -> bool:
        """Starts those that have not begun, and waits for all. False: runs start afresh."""
        self.begin(workers, alone=alone, modules=modules)
        for count, server in list(self._servers.items()):
            if not server.wait():
                self._servers.pop(count).close()
        return bool(self._servers)

    def start(
        self,
        command: Sequence[str],
        workers: int,
        sink: BinaryIO,
        more: Mapping[str, str] | None = None,
    ) -> RunProcess:
        """A run, in a session of its own: Ctrl-C reaches this process alone, which then stops it.

        It gets the variables of this process, and `more`.
        """
        variables = {**os.environ, **(more or {}), STARTED: repr(time.monotonic())}
        if workers in self._servers:
            with Path(os.devnull).open("rb") as nothing, contextlib.suppress(ForkError):
                streams = [nothing.fileno(), sink.fileno(), sink.fileno()]
                return self._servers[workers].start(
                    command, variables, streams=streams, serves=True
                )
        return subprocess.Popen(
            command,
            env=variables,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()


def problem_of(output: Path, code: int, outcome: OutcomeRecord | None) -> str:
    """One line on why a run failed."""
    if code == 0 and (outcome is None or not outcome.joined):
        return (
            "the script never called fd.init(), so nothing was distributed or measured: write "
            "`run = fd.init()` at its top, and run.log(…) where it evaluates"
        )
    if code == 0:
        return "the script ended without closing its metrics; did it call run.log(…)?"
    if outcome is not None and outcome.problem:
        return outcome.problem
    # The job did not get so far as to have an outcome: the last line is the launcher's error.
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {code}, and no output"

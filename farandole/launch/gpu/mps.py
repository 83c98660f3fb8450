"""An MPS daemon for one job: NVIDIA's Multi-Process Service, by which workers share a GPU.

    launcher ─┬─ nvidia-cuda-mps-control -f          listens in a private folder
              │        └─ nvidia-cuda-mps-server     is started for the first worker
              ├─ worker 0 … worker K-1               clients, by CUDA_MPS_PIPE_DIRECTORY
              └─ watchdog

Without MPS the GPU runs the kernels of one process at a time. With it the kernels of all workers
run side by side.

The daemon ends with the job. If the launcher is killed, the kernel ends its child, the control
daemon. The server is no child of the launcher; the watchdog finds it by the identity that both
carry among their variables, and removes the folder. Where the watchdog was killed too, the next
job does the same (`old_logs`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Sequence

import psutil

from farandole.errors import LaunchError
from farandole.launch.gpu.mps_control import (
    LOG_DIRECTORY,
    PIPE_DIRECTORY,
    THREAD_PERCENTAGE,
    answers,
    ask,
    control_program,
)
from farandole.launch.gpu.visible import VARIABLE
from farandole.launch.job import LostResourceError
from farandole.launch.messages import tell
from farandole.system.job_processes import IDENTITY, kill_leftovers
from farandole.system.orphans import tied_to_this_process
from farandole.system.owned_folders import SOCKETS, OwnedFolder, folder_for_sockets
from farandole.system.watchdog import Watchdog
from farandole.worker.signals import Stopped, signals_noted, signals_raised

_START_SECONDS = 60.0  # for its first answer
_ANSWER_SECONDS = 10.0  # for each attempt to get one
_QUIT_SECONDS = 20.0
_KILLED_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOG_LINES = 5


class MpsDaemon:
    """Serves the GPUs with these UUIDs until `close`.

    Raises `UserError` where MPS is not installed, `LaunchError` where it does not start, and
    `Stopped` on a signal meanwhile.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._program = control_program()
        self._uuids = list(uuids)
        self._identity = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._is_missed = False  # it has ended by itself, and the user was told
        self._has_answered = False
        with signals_noted() as received:
            self._folder = _private_folder(self._identity)
            identity = {IDENTITY: self._identity}
            self._watchdog = Watchdog(variables=identity, folders=[self._folder.path])
            self._pipes, self._logs = self._folder.path / "pipe", self._folder.path / "log"
            try:
                self._start()
                if not received:
                    with signals_raised():  # nothing is begun in there that could be left behind
                        self._await_answer()
                if received:
                    raise Stopped(received[0])
            except BaseException:
                self.close()
                raise

    @property
    def variables(self) -> dict[str, str]:
        """What makes a process a client of this daemon.

        GPUs are named by UUID, for the daemon and for its clients. A number would mean one GPU to
        the daemon and another to its clients, which count what the daemon shows them.
        """
        return {
            PIPE_DIRECTORY: str(self._pipes),
            LOG_DIRECTORY: str(self._logs),
            VARIABLE: ",".join(self._uuids),
        }

    def check(self) -> None:
        """Raises `LostResourceError` if the daemon has ended."""
        if (ended := self._end()) is not None:
            self._is_missed = True
            raise LostResourceError(
                f"{ended}. Workers that share a GPU cannot go on without it, and were stopped"
            )

    def close(self) -> None:
        """Ends the daemon and its server. The workers have ended before."""
        process = self._process
        if process is not None:
            if not self._is_missed and (ended := self._end()) is not None:
                tell(f"{ended}, before the job did")
            self._quit(process)
            self._process = None
        # The server, and whatever else the daemon has started.
        psutil.wait_procs(kill_leftovers(self._identity), timeout=_KILLED_SECONDS)
        self._folder.close()
        self._watchdog.close()

    def _start(self) -> None:
        for folder in (self._pipes, self._logs):
            folder.mkdir(mode=0o700)
        variables = {**os.environ, **self.variables, IDENTITY: self._identity}
        variables.pop(THREAD_PERCENTAGE, None)  # for workers; the daemon's would limit them all
        try:
            with (self._logs / "output").open("wb") as output:
                self._process = subprocess.Popen(
                    [self._program, "-f"],  # in the foreground: it is our child, and ends with us
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone
                    preexec_fn=tied_to_this_process(),
                )
        except OSError as error:
            raise LaunchError(
                f"cannot start the MPS daemon {self._program}: {error}. Is the file whole, and may "
                "you execute it?"
            ) from error

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if (ended := self._end()) is not None:
                self._is_missed = True
                raise LaunchError(f"{ended}, before it answered. {self._said()}")
            if answers(self._pipes, _ANSWER_SECONDS):
                self._has_answered = True
                return
            time.sleep(_POLL_SECONDS)
        assert self._process is not None
        raise LaunchError(
            f"the MPS daemon (process {self._process.pid}) did not answer within "
            f"{_START_SECONDS:g} s. {self._said()}"
        )

    def _end(self) -> str | None:
        """How it has ended, if it has."""
        code = None if self._process is None else self._process.poll()
        if self._process is None or code is None:
            return None
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"the MPS daemon ({self._program}, process {self._process.pid}) has ended ({how})"

    def _said(self) -> str:
        lines: list[str] = []
        for path in sorted(self._logs.glob("*")):
            with contextlib.suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        said = "; ".join(filter(None, map(str.strip, lines)))
        if said:
            return f"It says: {said}. Use one worker a GPU meanwhile: --per-gpu 1."
        return "It says nothing. Use one worker a GPU meanwhile: --per-gpu 1."

    def _quit(self, process: subprocess.Popen[bytes]) -> None:
        """Asks first: a daemon that is killed leaves its server to itself. One that has never
        answered has none."""
        will_end = (
            self._has_answered
            and process.poll() is None
            and ask("quit", self._pipes, _ANSWER_SECONDS) is not None
        )
        for end, seconds in (
            (lambda: None, _QUIT_SECONDS if will_end else 0.0),
            (process.terminate, _KILLED_SECONDS),
            (process.kill, _KILLED_SECONDS),
        ):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return


def _private_folder(identity: str) -> OwnedFolder:
    """In the temporary folder, or where that has too long a path for sockets, in /tmp."""
    try:
        return OwnedFolder(SOCKETS, identity, parent=folder_for_sockets())
    except OSError as error:
        raise LaunchError(
            f"cannot make a folder for the MPS daemon's sockets: {error}. Set TMPDIR to a folder "
            "with room."
        ) from error

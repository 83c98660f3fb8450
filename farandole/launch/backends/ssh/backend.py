"""Workers on other hosts: started by ssh, each under an agent that looks after it there.

    this host                                               other hosts
    ┌──────────────────────────────────┐   ssh     ┌────────────────────────────┐
    │ launcher                         │ ────────▶ │ agent ──▶ worker           │ × n
    │ store, at an address that the    │ ◀──────── │                            │
    │ others reach       worker × m    │  store    └────────────────────────────┘
    └──────────────────────────────────┘

ssh asks nobody for a password and accepts no key of a host that it does not know: both would leave
the job waiting. What it complains about is among the worker's errors.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

from farandole.environment import GRACE
from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.backends.remote.exported import exported
from farandole.launch.backends.ssh.agent import END, OUTPUT, WARNING, Order, read_frame
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.system.job_processes import IDENTITY
from farandole.system.orphans import tied_to_this_process

UNREACHABLE = 255
"""The exit code of ssh when it could not connect, or lost the connection."""


class RemoteWorker:
    """One worker on another host. Its output and its last error come into files of this host.

    Raises `LaunchError` when there is no ssh.
    """

    pid: int | None = None  # its process is on the other host
    stop_margin_seconds = 15.0

    def __init__(self, host: str, ssh: Ssh, order: Order, out: Path, err: Path, error: Path):
        self.host = host
        self._files = {OUTPUT: out, END: error}
        self._err = err
        self._exit_code: int | None = None
        # Standard input carries the rest; this is what it takes to find the agent at all.
        path = {key: order.variables[key] for key in ("PYTHONPATH",) if key in order.variables}
        agent = [sys.executable, "-m", "farandole.launch.backends.ssh.agent"]
        command = ["env", *(f"{key}={value}" for key, value in path.items()), *agent]
        with err.open("ab") as complaints:
            try:
                self._ssh = subprocess.Popen(
                    ssh.words(host, command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone
                    preexec_fn=tied_to_this_process(),
                )
            except OSError as failed:
                raise LaunchError(
                    f"cannot start ssh to host {host}: {failed}. Install an ssh client."
                ) from failed
        name = f"worker on {host}"
        self._thread = threading.Thread(target=self._listen, args=(order,), name=name, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; `UNREACHABLE` when the host was lost."""
        # The thread must have ended too: the frame with the exit code may still be in the pipe when
        # ssh ends.
        if self._ssh.poll() is None or self._thread.is_alive():
            return None
        return UNREACHABLE if self._exit_code is None else self._exit_code

    @property
    def advice(self) -> str:
        """The agent reports every end. Without a report, ssh has failed or the host was lost."""
        if self.poll() is None or self._exit_code is not None:
            return ""
        return f"host {self.host} cannot be reached by ssh, or was lost: try `ssh {self.host}`"

    def stop(self) -> None:
        """Its agent sees to it that it ends."""
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Only SIGUSR1, with which a scheduler says that it will end the job, can be sent."""
        assert number is signal.SIGUSR1
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has gone, or was stopped
            self._ssh.stdin.write(WARNING)
            self._ssh.stdin.flush()

    def kill(self) -> None:
        """Gives up the connection: its end makes the agent, if there is one, end the worker."""
        self._ssh.kill()

    def _listen(self, order: Order) -> None:
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it has gone, or was stopped meanwhile
            self._ssh.stdin.write(order.line())
            self._ssh.stdin.flush()
        with self._ssh.stdout as frames:
            while (frame := read_frame(frames)) is not None:
                kind, content = frame
                if kind == END:
                    self._note_end(content)
                    continue
                with (self._files.get(kind, self._err)).open("ab") as file:
                    file.write(content)

    def _note_end(self, content: bytes) -> None:
        said = json.loads(content)
        self._exit_code = int(said["exit_code"])
        if said["error"] is not None:
            self._files[END].write_text(said["error"])


class SshBackend:
    """Starts workers on other hosts."""

    def __init__(
        self, job: Job, directory: JobDirectory, endpoint: LauncherEndpoint, ssh: Ssh
    ) -> None:
        self._job = job
        self._directory = directory
        self._endpoint = endpoint
        self._ssh = ssh

    def reaches(self, host: str) -> bool:
        """ssh says later whether it does."""
        return True

    def start(self, spec: WorkerSpec) -> RemoteWorker:
        directory, job = self._directory, self._job
        variables = {
            **exported(),
            "LOCAL_WORLD_SIZE": str(spec.local_workers),  # for its share of the cores
            **spec.variables,
            **self._endpoint.remote_variables(),
            **job.environment,
            **(job.per_rank[spec.number] if job.per_rank else {}),
            IDENTITY: directory.identity,
            GRACE: f"{job.grace_seconds:g}",
        }
        order = Order(
            (job.program, *job.command),
            str(Path.cwd()),
            variables,
            directory.in_one_file,
            job.grace_seconds,
        )
        files = (directory.stdout_file, directory.stderr_file, directory.error_file)
        return RemoteWorker(spec.host, self._ssh, order, *(file(spec.number) for file in files))

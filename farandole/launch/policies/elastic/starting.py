"""Starts workers of an elastic job wherever their host is: here directly, elsewhere by ssh."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from farandole.environment import ELASTIC_WORKER
from farandole.errors import LaunchError
from farandole.launch.backends.ssh.agent import GRACE_SECONDS, Order
from farandole.launch.backends.ssh.start import RemoteWorker, Ssh, exported
from farandole.launch.job_directory import JobDirectory
from farandole.launch.processes import Process, start_process
from farandole.system.job_processes import IDENTITY
from farandole.system.process_state import is_stopped
from farandole.worker.network import interface_towards, is_here
from farandole.worker.store.hosted import JobStore

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = GRACE_SECONDS + 15.0  # an attendant first gives its worker time


class Running(Protocol):
    """A worker that has been started, here or elsewhere."""

    @property
    def pid(self) -> int | None:
        """Of its process; None on another host."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Asks no more."""


class _Here:
    def __init__(self, process: Process) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        # A stopped process would not hear of SIGTERM.
        self._send(signal.SIGKILL if is_stopped(self.pid) else signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.killpg(self._process.pid, number)


class Starter:
    """Knows what a worker is started with. `address` is where it reaches the launcher, and `alone`
    says that only workers of this host do."""

    def __init__(
        self,
        place: JobDirectory,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        whole_command: bool,
        address: str,
        store: JobStore,
        alone: bool,
        ssh: Ssh,
    ) -> None:
        self._place = place
        self._command = [*command] if whole_command else [sys.executable, *command]
        self._environment = environment
        self._address = address
        self._store = store
        self._alone = alone
        self._ssh = ssh

    def reaches(self, host: str) -> bool:
        """Whether workers of `host` can reach the launcher."""
        return is_here(host) or not self._alone

    def start(self, host: str, slots: int, number: int) -> Running:
        """Worker `number`, one of up to `slots` there. Raises `LaunchError` where it cannot."""
        variables = {
            ELASTIC_WORKER: str(number),
            "HOROVOD_HOSTNAME": host,  # hosts count as the discovery calls them
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if not is_here(host):
            variables |= self._store.elsewhere().variables()
            return self._start_there(host, slots, number, variables)
        variables |= self._store.here().variables()
        interface = interface_towards(self._address)
        if interface is not None and not self._alone:
            # Else gloo takes the address of the host's own name, which is often a loopback one.
            variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            return _Here(start_process(self._place, number, self._command, variables))
        except OSError as error:
            raise LaunchError(
                f"cannot start worker {number} on {host}: {error}. Is {self._command[0]!r} there? "
                "`farandole doctor` knows this machine's limits."
            ) from error

    def _start_there(
        self, host: str, slots: int, number: int, variables: Mapping[str, str]
    ) -> Running:
        told = {
            **exported(),
            **variables,
            **self._environment,
            "LOCAL_WORLD_SIZE": str(slots),  # for its share of the cores, until it has a seat
            IDENTITY: self._place.identity,
        }
        files = (self._place.stdout_file, self._place.stderr_file, self._place.error_file)
        order = Order(tuple(self._command), str(Path.cwd()), told, self._place.in_one_file)
        return RemoteWorker(host, self._ssh, order, *(file(number) for file in files))


def stop_all(workers: Collection[Running]) -> None:
    """Asks all to end, waits until they have, and gives up those that do not."""
    for worker in workers:
        worker.stop()
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for worker in workers:
        if worker.poll() is None:
            worker.kill()

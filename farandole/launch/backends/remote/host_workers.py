"""How an agent starts workers on its host: what they get beside their order, forked or afresh."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from farandole.environment import LAUNCHER
from farandole.errors import FarandoleError
from farandole.launch.backends.remote.activity_reports import ActivityReports
from farandole.launch.backends.remote.orders import Order, Setup
from farandole.launch.backends.remote.supervised import Supervised, start_supervised
from farandole.launch.forks import FEWEST_ON_EACH_HOST, Forks
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host
from farandole.system.cores import fair_share
from farandole.system.job_processes import IDENTITY, kill_having
from farandole.worker.forking.forked import is_script
from farandole.worker.network import interface_towards
from farandole.worker.store.address import launcher_store
from farandole.worker.store.protocol import COUNT

_CONNECT_SECONDS = 10.0


class HostWorkers:
    """Begins to import torch at once, if workers are to be forked, and waits for nothing."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup = setup
        self._folder = folder
        self.activity = ActivityReports(folder if setup.watches_activity else None)
        self._no_folder: OSError | None = None
        try:
            os.chdir(setup.folder)
        except OSError as error:
            self._no_folder = error
        self._variables = {**os.environ, **setup.variables}
        interface = interface_towards(self._variables["MASTER_ADDR"])
        # Else gloo takes the address of the host's own name, which is often a loopback one.
        self._gloo = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
        self._forks = self._begin_forks()
        self._no_way_back: str | None = None
        self._connecting = threading.Thread(target=self._show_token, name="show token", daemon=True)
        self._connecting.start()

    def facts(self, wait_seconds: float) -> HostFacts | None:
        """None: it is not known so far whether this host can connect to the launcher."""
        self._connecting.join(wait_seconds)
        if self._connecting.is_alive():
            return None
        setup = self._setup
        files = JobFiles(setup.folder, setup.script, setup.files)
        return facts_of_this_host(files, self._variables, self._no_way_back)

    def is_ready(self) -> bool:
        """Whether `start` can be called. Becomes so, whatever happens."""
        if self._forks is not None:
            ready = self._forks.look()
            if ready is None:
                return False
            if not ready:
                self._close_forks()
        return True

    def start(self, number: int, order: Order) -> Supervised:
        """Raises `OSError` where it cannot."""
        if self._no_folder is not None:
            raise self._no_folder
        error_file = self._folder / f"worker-{number}.error.json"
        error_file.unlink(missing_ok=True)  # an earlier life's
        return start_supervised(
            self._setup.command,
            {
                **self._defaults(order.local_workers),
                **self._variables,
                **order.variables,
                **self.activity.expect(number),
                **self._own(),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
            },
            error_file,
            forks=self._forks,
            shown={**self._own(), self._setup.worker_variable: str(number)},
            in_one_stream=self._setup.in_one_stream,
        )

    def kill_children(self, numbers: Sequence[int]) -> None:
        """Those that workers that have ended left behind."""
        kill_having({**self._wanted(), self._setup.worker_variable: {str(n) for n in numbers}})

    def kill_all(self) -> list[psutil.Process]:
        """Every process that this agent or its workers have started for the job."""
        return kill_having(self._wanted())

    def close(self) -> None:
        self._close_forks()

    def _own(self) -> dict[str, str]:
        """By these variables the processes of this agent are told apart from others of the job."""
        return {IDENTITY: self._setup.identity, LAUNCHER: str(os.getpid())}

    def _wanted(self) -> dict[str, set[str]]:
        return {name: {value} for name, value in self._own().items()}

    def _defaults(self, workers: int) -> dict[str, str]:
        threads = str(fair_share(workers))
        return {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **self._gloo}

    def _begin_forks(self) -> Forks | None:
        setup = self._setup
        is_worth_it = setup.workers >= FEWEST_ON_EACH_HOST and is_script(setup.command)
        if not (setup.may_fork and is_worth_it):
            return None
        return Forks.begin({**self._defaults(setup.workers), **self._variables})

    def _close_forks(self) -> None:
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def _show_token(self) -> None:
        """Shows the job's token to the launcher's store, which then lets in PyTorch's own clients
        from this host: a script that forms its process group itself has no token to show."""
        store = None
        try:
            store = launcher_store(self._variables)
            if store is None:
                return
            link = store.connect(_CONNECT_SECONDS)
            try:
                link.ask(COUNT, (), _CONNECT_SECONDS)  # the answer says that it was let in
            finally:
                link.close()
        except (OSError, FarandoleError) as error:
            self._no_way_back = f"{store}: {error}"

"""Parameter servers for a job: the registrar in this process, servers in processes of their own.

    with Cluster(servers=2, replicas=1) as cluster:
        store = connect(cluster.address, cluster.key_file)

When a server dies, its successor in each chain takes over, and another process is
started in its place. When this process ends, however it ends, so do the servers.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from farandole.environment import SERVER_KEY, SERVERS
from farandole.errors import LaunchError, UserError
from farandole.server.node.service import Service
from farandole.server.protocol.seal import make_key, read_key
from farandole.server.registrar.registrar import Registrar
from farandole.server.registrar.service import RegistrarService
from farandole.server.server_handles import (
    ServerHandle,
    ServerProcess,
    ServerThread,
    server_command,
)
from farandole.system.owned_folders import OwnedFolder
from farandole.system.watchdog import Watchdog

_START_SECONDS = 60.0
_CONFIRM_SECONDS = 1.0
_LIVES = 100  # of servers in a row, before there must be something wrong with them


class Cluster:
    """Starts with `with`, ends with it. `workers`: how many are waited for before any begins.

    `functions` are the modules in which servers look for rules and questions of your own. `bind` is
    where registrar and servers listen; beyond loopback there must be a `key_file` that the other
    hosts can read too. `in_threads` keeps the servers in this process, for tests and small jobs.
    """

    def __init__(
        self,
        *,
        servers: int = 1,
        replicas: int = 0,
        functions: Sequence[str] = (),
        workers: int = 0,
        bind: str = "127.0.0.1:0",
        key_file: Path | None = None,
        in_threads: bool = False,
        worker_patience: float = 20.0,
    ) -> None:
        self._registrar = Registrar(servers, replicas)
        self._servers = servers
        self._replicas = replicas
        self._functions = tuple(functions)
        self._host, registrar_port = _split_address(bind)
        if not _is_loopback(self._host) and key_file is None:
            raise UserError(
                f"servers at {bind} can be reached from other hosts: give a key file that those "
                "have too (key_file=, --key-file)."
            )
        for module in functions:
            _check_importable(module)
        self._own_folder = OwnedFolder("servers")
        self._watchdog = Watchdog(folders=[self._own_folder.path])
        try:
            self.key_file = key_file or self._own_folder.path / "key"
            self._key = (
                read_key(self.key_file) if self.key_file.exists() else make_key(self.key_file)
            )
            self._service = RegistrarService(
                self._registrar,
                self._key,
                bind=f"tcp://{self._host}:{registrar_port or '*'}",
                workers=workers,
                worker_patience=worker_patience,
            )
        except BaseException:
            self._remove_folder()
            raise
        self.address = self._service.address
        self._in_threads = in_threads
        self._servers_running: dict[str, ServerHandle] = {}
        self._started = 0
        self._lines: list[str] = []
        self._closed = False

    def __enter__(self) -> Self:
        try:
            for _ in range(self._servers):
                self._start_one()
            self._await_servers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """For the workers."""
        return {SERVERS: self.address, SERVER_KEY: str(self.key_file.resolve())}

    @property
    def pids(self) -> list[int]:
        """Of the server processes."""
        members = self._servers_running.values()
        return [member.process.pid for member in members if isinstance(member, ServerProcess)]

    def lost(self, rank: int) -> None:
        """This worker's process has ended badly: nobody need wait for its silence."""
        self._service.lose_worker(rank)

    def restarted(self, rank: int) -> None:
        self._service.expect_worker(rank)

    def add_server(self) -> None:
        """One more; ranges move to it while everything goes on."""
        self._start_one()

    def facts(self) -> dict[int, dict[str, Any]]:
        """What each server last said of itself, by its number."""
        return self._service.facts()

    @property
    def is_settled(self) -> bool:
        """Whether any `replicas` servers could die now and nothing acknowledged would be lost.

        Every range is where it belongs, and `replicas` + 1 living servers have confirmed that they
        hold the whole of it. They are asked when you ask: that takes a message to each server and
        back, and at most a second.
        """
        return self._service.is_settled and self.missing_copies() == 0

    def missing_copies(self) -> int:
        """How many copies of ranges there are fewer than `replicas` + 1 of each, as living servers
        confirm now. A server that does not answer within a second has none."""
        return self._service.missing_copies(_CONFIRM_SECONDS, self._has_dead_servers)

    def _has_dead_servers(self) -> bool:
        return any(member.ended() is not None for member in list(self._servers_running.values()))

    def check(self) -> list[str]:
        """Call it a few times a second: replaces dead servers, and says what has happened.

        Raises `LaunchError` when data is lost, because all that held it are dead.
        """
        for mark, member in list(self._servers_running.items()):
            how = member.ended()
            if how is not None:
                del self._servers_running[mark]
                # The registrar hears it before the next server is started, so that the chains are
                # closed without waiting for the dead one's silence.
                self._service.lose_server(mark)
                what = (
                    "its successor takes over" if self._replicas else "there was no replica of it"
                )
                self._lines.append(f"a parameter server {how}; {what}")
                if self._started > _LIVES + self._servers:
                    raise LaunchError(
                        f"{_LIVES} parameter servers have died. The last one {how}. See above."
                    )
                self._start_one()
        if self._service.loss:
            raise LaunchError(self._service.loss)
        lines, self._lines = self._lines + self._service.take_lines(), []
        return lines

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for member in self._servers_running.values():
            member.stop()
        self._service.close()
        for member in self._servers_running.values():
            member.end()
        self._remove_folder()

    def _remove_folder(self) -> None:
        self._own_folder.close()
        self._watchdog.close()

    def _start_one(self) -> None:
        self._started += 1
        mark = uuid.uuid4().hex
        bind = f"tcp://{self._host}:*"
        if self._in_threads:
            service = Service(
                self.address, self._key, bind=bind, functions=self._functions, mark=mark
            )
            self._servers_running[mark] = ServerThread(service)
        else:
            command = server_command(self.address, self.key_file, bind, self._functions, mark)
            self._servers_running[mark] = ServerProcess(command)

    def _await_servers(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._registrar.has_begun:
            for member in self._servers_running.values():
                how = member.ended()
                if how is not None:
                    raise LaunchError(f"a parameter server {how} while starting. See its output.")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._servers} parameter servers did not report within "
                    f"{_START_SECONDS:g} s. See their output."
                )
            time.sleep(0.01)


def join_cluster(
    address: str, key_file: Path, bind: str = "127.0.0.1:0", functions: Sequence[str] = ()
) -> None:
    """Adds one server, in this process, to a running cluster; returns when that ends."""
    host, port = _split_address(bind)
    service = Service(
        address, read_key(key_file), bind=f"tcp://{host}:{port or '*'}", functions=functions
    )
    service.run()


def _split_address(bind: str) -> tuple[str, int]:
    host, colon, port = bind.removeprefix("tcp://").rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise UserError(f"{bind!r} is not an address to listen at; write host:port, port 0: any.")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def _check_importable(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--functions {module}: it cannot be imported here: {error}.") from error

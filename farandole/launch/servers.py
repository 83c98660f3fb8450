"""The parameter servers of a job: how many to start for it, or whose to use.

Jobs with servers are tolerant ones. What the servers are is `farandole.server`'s business; here
they are started before the workers, told of those that are lost, and ended after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.errors import UserError
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_tolerant
from farandole.worker.signals import signals_noted

if TYPE_CHECKING:
    from farandole.sync import Strategy

_ADDRESS = re.compile(r"tcp://(?P<host>[^/:\s]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class OwnServers:
    """Servers that are started for one job and end with it."""

    count: int
    replicas: int
    functions: tuple[str, ...] = ()


@dataclass(frozen=True)
class OthersServers:
    """Servers that somebody has started with `farandole server`."""

    address: str
    key_file: Path


def needs_servers(strategy: Strategy) -> bool:
    return bool(getattr(strategy, "needs_servers", False))


def plan_servers(
    strategy: Strategy | None,
    servers: str | None = None,
    replicas: int | None = None,
    functions: Sequence[str] = (),
    key_file: Path | None = None,
) -> OwnServers | OthersServers | None:
    """What the options of `farandole run` ask for; None is a job without servers.

    A strategy of None is left to the script, which knows best whether it needs servers. Raises
    `UserError` for what does not go together.
    """
    needed = strategy is not None and needs_servers(strategy)
    if servers is None and not needed:
        given = {"--replicas": replicas, "--functions": functions or None, "--key-file": key_file}
        for option, value in given.items():
            if value is not None:
                raise UserError(
                    f"{option} is for parameter servers, and this job has none. Leave it out, or "
                    "give --servers too."
                )
        return None
    if strategy is not None and not needed:
        raise UserError(
            f"--servers {servers}: --sync {strategy} needs no parameter servers. Leave --servers "
            "out, or choose a strategy that needs them, such as --sync server."
        )
    if servers is not None and servers.startswith("tcp:"):
        return _others(servers, replicas, functions, key_file)
    try:
        count = 1 if servers is None else int(servers)
    except ValueError:
        raise UserError(
            f"--servers {servers!r}: give a number of servers to start, or the address of those "
            "that run, such as tcp://127.0.0.1:40123."
        ) from None
    if key_file is not None:
        raise UserError(
            f"--key-file {key_file} is for servers at an address: --servers tcp://HOST:PORT. Those "
            "of a job have a key of their own."
        )
    return OwnServers(count, check_replicas(count, replicas), tuple(functions))


def check_replicas(servers: int, replicas: int | None) -> int:
    """How many copies there are beside the first: as many as asked for, or the default."""
    if servers < 1:
        raise UserError(f"--servers {servers}: ask for at least 1.")
    if replicas is None:
        return 1 if servers > 1 else 0
    if replicas < 0:
        raise UserError(f"--replicas {replicas}: ask for 0 or more.")
    if replicas >= servers:
        raise UserError(
            f"--replicas {replicas}: each copy is on a server of its own, so that --servers "
            f"{servers} can keep at most {servers - 1}. Give --servers {replicas + 1} or more."
        )
    return replicas


def check_address(option: str, address: str) -> str:
    """The host in `tcp://host:port`."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise UserError(
            f"{option} {address!r} is not an address such as tcp://127.0.0.1:40123, which "
            "`farandole server` prints."
        )
    return found["host"].strip("[]")


def check_key_file(option: str, key_file: Path | None) -> Path:
    """The key that opens the servers at an address."""
    if key_file is None:
        raise UserError(
            f"{option} needs the servers' key: --key-file FILE; `farandole server` prints its name."
        )
    if not key_file.is_file():
        raise UserError(
            f"there is no key file {key_file}. Copy the one that `farandole server` names to this "
            "host."
        )
    return key_file.absolute()


def _others(
    address: str, replicas: int | None, functions: Sequence[str], key_file: Path | None
) -> OthersServers:
    check_address("--servers", address)
    for option, value in (("--replicas", replicas), ("--functions", functions or None)):
        if value is not None:
            raise UserError(
                f"{option} is for servers that are to be started; those at {address} run. Give it "
                "to `farandole server`."
            )
    return OthersServers(address, check_key_file(f"--servers {address}", key_file))


def launch_with_servers(job: Job, plan: OwnServers) -> Outcome:
    """Runs `job` and its servers to its end. Leaves no process of either behind.

    Raises `LaunchError` when servers died and with them what no other server had.
    """
    from farandole.server.cluster import Cluster  # jobs without servers need no pyzmq

    # Also while the servers start and end: a signal in the middle of it could leave some behind.
    with (
        signals_noted() as received,
        Cluster(
            servers=plan.count,
            replicas=plan.replicas,
            functions=plan.functions,
            workers=job.workers,
        ) as cluster,
    ):
        if received:
            return Outcome(stopped_by=received[0])
        return launch_tolerant(
            replace(job, environment={**job.environment, **cluster.environment}),
            on_lost=cluster.lost,
            on_restart=cluster.restarted,
            check=cluster.check,
        )

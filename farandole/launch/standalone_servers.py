"""Parameter servers that no job has started: they run until a signal ends them."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import click

from farandole.environment import SERVER_KEY, SERVERS
from farandole.errors import UserError
from farandole.launch.servers import check_address, check_key_file, check_replicas
from farandole.worker.environment import is_loopback
from farandole.worker.signals import handlers_kept, signals_noted

_POLL_SECONDS = 0.1


def serve(
    servers: int | None,
    replicas: int | None,
    functions: tuple[str, ...],
    bind: str,
    key_file: Path | None,
) -> None:
    """Starts servers, and runs them until a signal comes. Raises `UserError`."""
    if key_file is None and not is_loopback(_check_bind(bind)):
        raise UserError(
            f"--bind {bind}: other hosts can reach that, so name a key that only yours have: "
            "--key-file FILE."
        )
    count = 1 if servers is None else servers
    copies = check_replicas(count, replicas)

    from farandole.server.cluster import Cluster  # here: without ZeroMQ until it is needed

    with (
        signals_noted() as received,
        Cluster(
            servers=count,
            replicas=copies,
            functions=functions,
            bind=bind,
            key_file=key_file,
        ) as cluster,
    ):
        address = cluster.environment[SERVERS]
        key = cluster.environment[SERVER_KEY]
        click.echo(f"{count} server(s) at {address}, key file {key}. Ctrl-C ends them.")
        click.echo(
            f"  farandole run --servers {address} --key-file {shlex.quote(key)} --sync server …"
        )
        click.echo(f"  fd.server.connect({address!r}, {key!r})")
        while not received:
            time.sleep(_POLL_SECONDS)
            for line in cluster.check() or ():
                click.echo(f"farandole: {line}", err=True)
    click.echo(f"farandole: stopped by {received[0]}; no server is left", err=True)


def join_servers(
    address: str, bind: str, key_file: Path | None, functions: tuple[str, ...]
) -> None:
    """Adds one server to those at `address`, and runs it until a signal comes."""
    host = _check_bind(bind)
    there = check_address("--join", address)
    key = check_key_file(f"--join {address}", key_file)
    if is_loopback(host) and not is_loopback(there):
        raise UserError(
            f"--bind {bind}: the servers at {address} cannot reach that. Give an address of this "
            "host that they can: --bind HOST:0."
        )

    from farandole.server.cluster import join_cluster

    with handlers_kept():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        try:
            click.echo(f"one more server for {address}. Ctrl-C ends it.")
            join_cluster(address, key, bind, functions)
        except KeyboardInterrupt:
            click.echo("farandole: stopped; the others go on", err=True)


def _check_bind(bind: str) -> str:
    """The host in `host:port`."""
    host, colon, port = bind.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise UserError(
            f"--bind {bind!r} is not an address and a port, such as 10.0.0.5:4100, or 10.0.0.5:0 "
            "for any free port."
        )
    return host.strip("[]")

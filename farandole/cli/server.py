"""`farandole server`: parameter servers for other hosts' jobs, or to use as a library."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import click

from farandole.errors import UserError

_POLL_SECONDS = 0.1
_BIND = "127.0.0.1:0"


@click.command()
@click.option("--servers", type=int, metavar="N", help="How many to start on this host. [1]")
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Further copies of all that the servers hold, on other servers: so many may die. "
    "[1 with several servers, else 0]",
)
@click.option(
    "--bind",
    default=_BIND,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen: an address of this host; port 0 is any free one.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The key that opens the servers; needed where other hosts can reach them. [a new one]",
)
@click.option(
    "--functions",
    metavar="MODULE",
    multiple=True,
    help="A module with functions that the servers shall run. Give it once for each; one that "
    "joins needs those of the others.",
)
@click.option(
    "--join", metavar="tcp://HOST:PORT", help="Add one server to those that run at this address."
)
def server(
    servers: int | None,
    replicas: int | None,
    bind: str,
    key_file: Path | None,
    functions: tuple[str, ...],
    join: str | None,
) -> None:
    """Start parameter servers, and run them until Ctrl-C.

    Prints where they are and which key opens them, as `farandole run --servers` and
    `fd.server.connect` want it. What they hold is gone when they end.

    \b
      farandole server --servers 3
      farandole server --bind 10.0.0.5:4100 --key-file cluster.key
      farandole server --join tcp://10.0.0.5:4100 --bind 10.0.0.6:0 --key-file cluster.key
    """
    host = _check_bind(bind)
    if join is not None:
        for option, given in (
            ("--servers", servers is not None),
            ("--replicas", replicas is not None),
        ):
            if given:
                raise UserError(
                    f"--join adds one server to those at {join}, which know their {option}. Leave "
                    f"{option} out."
                )
        _join(join, host, bind, key_file, functions)
        return

    from farandole.launch.servers import check_replicas
    from farandole.worker.environment import is_loopback

    if key_file is None and not is_loopback(host):
        raise UserError(
            f"--bind {bind}: other hosts can reach that, so name a key that only yours have: "
            "--key-file FILE."
        )
    count = 1 if servers is None else servers
    _serve(count, check_replicas(count, replicas), functions, bind, key_file)


def _serve(
    servers: int, replicas: int, functions: tuple[str, ...], bind: str, key_file: Path | None
) -> None:
    from farandole import environment as variables
    from farandole.server.cluster import Cluster
    from farandole.worker.signals import signals_noted

    with (
        signals_noted() as received,
        Cluster(
            servers=servers,
            replicas=replicas,
            functions=functions,
            bind=bind,
            key_file=key_file,
        ) as cluster,
    ):
        address = cluster.environment[variables.SERVERS]
        key = cluster.environment[variables.SERVER_KEY]
        click.echo(f"{servers} server(s) at {address}, key file {key}. Ctrl-C ends them.")
        click.echo(
            f"  farandole run --servers {address} --key-file {shlex.quote(key)} --sync server …"
        )
        click.echo(f"  fd.server.connect({address!r}, {key!r})")
        while not received:
            time.sleep(_POLL_SECONDS)
            for line in cluster.check() or ():
                click.echo(f"farandole: {line}", err=True)
    click.echo(f"farandole: stopped by {received[0]}; no server is left", err=True)


def _join(
    address: str, host: str, bind: str, key_file: Path | None, functions: tuple[str, ...]
) -> None:
    from farandole.launch.servers import check_address, check_key_file
    from farandole.worker.environment import is_loopback
    from farandole.worker.signals import handlers_kept

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

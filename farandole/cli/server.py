"""`farandole server`: starts parameter servers for jobs of other hosts, or for use as a library."""

from __future__ import annotations

from pathlib import Path

import click

from farandole.errors import UserError

_BIND = "127.0.0.1:0"


@click.command()
@click.option(
    "--servers", type=int, metavar="N", help="Number of servers to start on this host. [1]"
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Number of extra copies of each range of parameters, on other servers. As many servers "
    "may fail as there are extra copies. [1 with several servers, else 0]",
)
@click.option(
    "--bind",
    default=_BIND,
    show_default=True,
    metavar="HOST:PORT",
    help="Address of this host to listen on. Port 0 picks a free port.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with the key of the servers. Required if other hosts can reach them. [a new key]",
)
@click.option(
    "--functions",
    metavar="MODULE",
    multiple=True,
    help="Module with functions that the servers may run. Repeat it for several modules. A server "
    "that joins others needs the same modules.",
)
@click.option(
    "--join",
    metavar="tcp://HOST:PORT",
    help="Add one server to the servers at this address, instead of starting new ones.",
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

    The command prints the address and the key file of the servers, for `farandole run --servers`
    and `fd.server.connect`. The servers keep their parameters in memory only.

    \b
      farandole server --servers 3
      farandole server --bind 10.0.0.5:4100 --key-file cluster.key
      farandole server --join tcp://10.0.0.5:4100 --bind 10.0.0.6:0 --key-file cluster.key
    """
    from farandole.launch.standalone_servers import join_servers, serve

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
        join_servers(join, bind, key_file, functions)
    else:
        serve(servers, replicas, functions, bind, key_file)

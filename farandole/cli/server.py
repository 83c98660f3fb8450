"""`farandole server`: parameter servers for other hosts' jobs, or to use as a library."""

from __future__ import annotations

from pathlib import Path

import click

from farandole.errors import UserError

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

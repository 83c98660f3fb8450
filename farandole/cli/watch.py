"""`farandole watch`: the page of a run, a race or a study while it runs."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import click

from farandole.cli.options import price_option
from farandole.errors import UserError


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1 to listen on. [a free one]",
)
@click.option(
    "--browser/--no-browser",
    default=False,
    help="Also open the page in the browser of this machine. [--no-browser: print its address]",
)
@click.option(
    "--target",
    metavar="METRIC=VALUE",
    help="Another target than the one of the race, such as accuracy=0.95. [the race's]",
)
@price_option()
@click.argument(
    "folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False)
)
def watch(port: int, browser: bool, target: str | None, price: float | None, folder: Path) -> None:
    """Show the page of DIR live: a race, a study, a run, or a folder with runs in it, as runs/ is.

    The command prints an address. Whoever has it can see the page, and nobody else. It listens on
    this machine alone (127.0.0.1); from another one, use ssh -L PORT:127.0.0.1:PORT. Ctrl-C ends
    it. What it shows does not notice that it is watched.

    \b
      farandole watch runs/race-train-20260131-235959
      farandole watch runs/tune-train-20260131-235959
      farandole watch runs/digits-daso --target accuracy=0.95 --port 8765
    """
    if find_spec("tornado") is None:
        raise UserError("farandole watch needs tornado: pip install 'farandole[watch]'")

    from farandole.race.options import check_price
    from farandole.report.target import Target
    from farandole.watch.opening import announce
    from farandole.watch.server import serve
    from farandole.watch.source import WatchedFolder

    check_price(price)
    goal = None if target is None else Target.parse(target)
    with announce(folder, browser=browser) as ready:
        asyncio.run(serve(WatchedFolder(folder, goal, price), port, ready))

"""`farandole report`: draws races again, merges them and compares them."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farandole.cli.options import price_option


@click.command()
@click.option(
    "--target",
    metavar="METRIC=VALUE",
    help="Another target than the one of the race. Required for runs that are no race, to compare "
    "times. [the race's]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the report. [the folder itself if there is one, else runs/report]",
)
@price_option()
@click.argument(
    "folders",
    metavar="DIR…",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
def report(
    target: str | None, out: Path | None, price: float | None, folders: tuple[Path, ...]
) -> None:
    """Draw the report of one race again, or one report of several races or runs.

    Each DIR is the folder of a race or of a run. Races of the same script under the same settings
    are merged: the seeds of a lane count together. Otherwise they are compared: the name of its
    folder follows each lane.

    \b
      farandole report runs/race-train-20260131-235959 --target accuracy=0.97
      farandole report runs/race-train-20260131-235959 runs/race-train-20260201-120000
      farandole report runs/digits-serial runs/digits-daso --target accuracy=0.95
    """
    from farandole.race.collect import draw

    sys.exit(draw(folders, out, target, price))

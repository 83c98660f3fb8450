"""The command line: one small file for each command. Commands import torch only when they run."""

from __future__ import annotations

import atexit
import gc
import sys

import click

import farandole
from farandole.cli.bench import bench
from farandole.cli.doctor import doctor
from farandole.cli.emulate import emulate
from farandole.cli.encoding import print_any_character
from farandole.cli.pack import pack
from farandole.cli.race import race
from farandole.cli.report import report
from farandole.cli.run import run
from farandole.cli.schedule import schedule
from farandole.cli.server import server
from farandole.cli.tune import tune
from farandole.cli.watch import watch
from farandole.errors import FarandoleError, UserError
from farandole.horovod.cli import horovodrun


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(farandole.__version__, prog_name="farandole")
def commands() -> None:
    """Train a PyTorch model on many workers, and find out which scheme reaches your accuracy
    first."""


for _command in (
    run,
    race,
    tune,
    report,
    watch,
    horovodrun,
    schedule,
    server,
    bench,
    doctor,
    emulate,
    pack,
):
    commands.add_command(_command)


def main() -> None:
    """The entry point: our own errors become one clear line instead of a traceback."""
    # Without this the garbage collector visits all of torch at exit, which takes half a second.
    atexit.register(gc.freeze)
    print_any_character()
    try:
        commands(prog_name="farandole")
    except FarandoleError as error:
        click.secho(f"farandole: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)

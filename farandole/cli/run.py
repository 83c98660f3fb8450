"""`farandole run`: start a script on workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from farandole import environment
from farandole.cli.options import (
    PASS_ON,
    hosts_option,
    layout_option,
    seed_option,
    sync_option,
)
from farandole.launch.outcome_text import print_outcome


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, help="Workers on this host. [one per GPU, else 1]")
@layout_option()
@sync_option()
@click.option("--name", help="The run's folder below --runs. [<script>-<time>]")
@click.option("--runs", type=click.Path(path_type=Path), help="Where runs are kept. [runs]")
@click.option(
    "--fallback",
    is_flag=True,
    help="If the newest checkpoint is damaged or not finite, go on from the newest good one.",
)
@seed_option()
@click.option(
    "--transport",
    metavar="NAME",
    help="What carries the bytes: auto, shm (shared memory) or c10d (gloo, NCCL). [auto]",
)
@hosts_option()
@click.option(
    "--no-check-finite",
    is_flag=True,
    help="Go on with gradients and parameters that are NaN or infinite, instead of stopping.",
)
@click.option(
    "--trace",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    envvar=environment.TRACE,
    help="Write a timeline of all ranks, for https://ui.perfetto.dev.",
)
@click.option(
    "--servers",
    metavar="N|tcp://HOST:PORT",
    help="Parameter servers to start for the job, or where those of `farandole server` are. "
    "[1 where --sync needs one]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Further copies of all that the servers hold, on other servers: so many may die. "
    "[1 with several servers, else 0]",
)
@click.option(
    "--functions",
    metavar="MODULE",
    multiple=True,
    help="A module with functions that the servers shall run. Give it once for each.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The key of servers at an address; `farandole server` prints its name.",
)
@click.option(
    "--restarts",
    type=int,
    default=0,
    metavar="R",
    help="Under servers: start a worker that has failed again, up to R times. [0]",
)
@click.option(
    "--exit-timeout",
    type=float,
    metavar="SECONDS",
    help="Once a worker is done, end the others after so long. [15 minutes of doing nothing, a day "
    "in any case]",
)
@click.option(
    "--stall",
    type=float,
    metavar="SECONDS",
    help="Name a worker that makes no step for so long, and show its Python stack.",
)
@click.option(
    "--stall-kill",
    is_flag=True,
    help="With --stall: also end that worker, if it does not just wait for another.",
)
@click.option(
    "--grace",
    type=float,
    default=30.0,
    metavar="SECONDS",
    help="When the job is stopped: how long workers have to save once more and leave. [30]",
)
@click.option(
    "--horovod",
    is_flag=True,
    help="In the workers, `import horovod` is Farandole's: for scripts written for Horovod.",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start every worker afresh; else 3 and more are forked from a process that has torch.",
)
@click.option("--joined-file", hidden=True, type=click.Path(path_type=Path))  # for `race`
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(joined_file: Path | None, horovod: bool, trace: Path | None, **options: Any) -> None:
    """Start SCRIPT on workers of this host, each a process of its own.

    The script calls `fd.init()` and finds itself as one rank of many. Every line of output carries
    its rank; if a worker fails, the others are stopped and its traceback is shown last. With
    parameter servers only rank 0 is so important: without any other worker the rest go on.

    \b
      farandole run -n 4 train.py --epochs 10
      farandole run -n 4 --sync local:every=8 train.py
      farandole run -n 4 --layout stages=4,microbatches=8 train.py
      farandole run -n 4 --hosts 2 --sync daso train.py
      farandole run -n 4 --trace out.json train.py
      farandole run -n 4 --sync server --servers 3 --restarts 1 train.py
      farandole run -n 4 --horovod train_with_horovod.py
    """
    from farandole.cli.run_job import RunOptions, check, run_job

    chosen = RunOptions(horovod=horovod, trace=trace.absolute() if trace else None, **options)
    check(chosen)
    outcome, workers = run_job(chosen)
    print_outcome(outcome, workers)
    if joined_file is not None and outcome.joined:
        joined_file.touch()
    sys.exit(outcome.exit_code)

"""`farandole race`: runs the same script under each scheme, and compares the times to a target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from farandole.cli.host_options import host_options
from farandole.cli.options import (
    PASS_ON,
    check_limits,
    check_link,
    check_script,
    checkpoint_option,
    grace_option,
    layout_option,
    link_option,
    pretend_hosts_option,
    price_option,
    seed_option,
    stall_option,
    sync_option,
    tell_of_late_options,
)
from farandole.errors import UserError


@click.command(context_settings=PASS_ON)
@click.option(
    "-n",
    "--workers",
    type=int,
    help="Number of workers of each lane. Required without hosts. [all slots of the hosts]",
)
@host_options
@layout_option(multiple=True)
@sync_option(multiple=True)
@click.option(
    "--lane",
    "lanes",
    metavar="LAYOUT/STRATEGY",
    multiple=True,
    help="Add one lane: a strategy, a layout or both, such as stages=2/daso. May be repeated.",
)
@click.option("--serial", is_flag=True, help="Also run the script on one worker, for comparison.")
@click.option(
    "--target",
    metavar="METRIC=VALUE",
    help='Metric to reach, such as accuracy=0.95 or "loss<=0.3". The script must log it with '
    "run.log.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of all runs.",
)
@checkpoint_option(place=", in the folder of each lane")
@seed_option()
@click.option(
    "--seeds",
    metavar="N|SEED,…",
    help="Run each lane with N seeds, from --seed on, or with these. The results then have medians "
    "and intervals, and lanes whose order is not certain are tied. [1]",
)
@click.option(
    "--stop-at-target", is_flag=True, help="Stop each lane as soon as it has reached the target."
)
@click.option(
    "--budget",
    type=float,
    metavar="SECONDS",
    help="Stop each lane after so many seconds, its start included. [no limit]",
)
@click.option(
    "--halve",
    is_flag=True,
    help="Successive halving, for many lanes: short runs of all of them, then of the better half, "
    "twice as long, and so on. --budget is what the last ones get.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Go on with the race in this folder: run what is missing. With --sync, --layout, --lane, "
    "--serial or --seeds it gets more lanes or seeds. SCRIPT is left out.",
)
@price_option()
@click.option(
    "--trace",
    is_flag=True,
    help="Also record when each rank computes and waits: trace.json in the folder of each lane, "
    "and a timeline in the report. It takes up to 2 % of a step.",
)
@pretend_hosts_option()
@link_option()
@click.option(
    "--servers",
    type=int,
    metavar="N",
    help="Number of parameter servers for each strategy that needs them. [1]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Number of extra copies of each range of parameters, on other servers. As many servers "
    "may fail as there are extra copies. [1 with several servers, else 0]",
)
@stall_option()
@grace_option()
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def race(
    layout: tuple[str, ...],
    sync: tuple[str, ...],
    stall: float | None,
    grace: float,
    script: str | None,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Run SCRIPT under each strategy in turn, and report which one reaches the target first.

    All lanes get the same seed and the same arguments. If layouts are given too, each layout runs
    with each strategy. With --checkpoint every lane saves in its own folder, and the time that this
    takes counts. An interrupted race goes on with --resume. The command shows a live table, then
    writes report.html, report.png and summary.json.

    \b
      farandole race -n 4 --pretend-hosts 2 --sync allreduce --sync local:every=8 --sync daso \\
                     --target accuracy=0.95 train.py
      farandole race -n 4 --pretend-hosts 2 --link 200mbit,1ms --sync allreduce --sync daso \\
                     --target accuracy=0.95 train.py
      farandole race -H node1:4,node2:4 --sync allreduce --sync daso train.py
      farandole race -n 4 --layout whole --layout stages=4,microbatches=8 \\
                     --target accuracy=0.95 train.py
      farandole race -n 4 --seeds 3 --stop-at-target --lane allreduce --lane stages=4/daso \\
                     --target accuracy=0.95 train.py
      farandole race --resume runs/race-train-20260131-235959 --sync adacomm --seeds 5
      farandole race -n 4 --servers 2 --sync allreduce --sync server --target loss=0.3 train.py
    """
    workers, resume = given["workers"], given["resume"]
    if workers is not None and workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
    check_limits(stall, grace)
    if resume is None:
        check_link(given["link"], given["pretend_hosts"])
        if script is None:
            raise UserError("which script shall race? Give it last, or --resume DIR.")
        check_script(script)
        tell_of_late_options(arguments, _missing(layout, sync, given))

    from farandole.race.options import RaceOptions
    from farandole.race.race import run_race

    command = () if script is None else (script, *arguments)
    sys.exit(
        run_race(
            RaceOptions(
                command=command, layouts=layout, syncs=sync, stall=stall, grace=grace, **given
            )
        )
    )


def _missing(layout: tuple[str, ...], sync: tuple[str, ...], given: dict[str, Any]) -> list[str]:
    """Options that a race needs, or is seldom run without."""
    workers = [] if given["workers"] is not None else ["-n", "--workers"]
    has_lanes = layout or sync or given["lanes"] or given["serial"]
    lanes = [] if has_lanes else ["--sync", "--layout", "--lane", "--serial"]
    return [*workers, *lanes, *([] if given["target"] else ["--target"])]

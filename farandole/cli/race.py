"""`farandole race`: runs the same script under each scheme, and compares the times to a target."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farandole.cli.host_options import host_options
from farandole.cli.options import (
    PASS_ON,
    check_limits,
    check_script,
    checkpoint_option,
    grace_option,
    layout_option,
    pretend_hosts_option,
    seed_option,
    stall_option,
    sync_option,
)
from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions


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
@seed_option(default=0)
@pretend_hosts_option()
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
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def race(
    workers: int | None,
    layout: tuple[str, ...],
    sync: tuple[str, ...],
    serial: bool,
    target: str | None,
    runs: Path,
    checkpoint: str | None,
    seed: int,
    where: HostOptions,
    pretend_hosts: str | None,
    servers: int | None,
    replicas: int | None,
    stall: float | None,
    grace: float,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT under each strategy in turn, and report which one reaches the target first.

    All lanes get the same seed and the same arguments. If layouts are given too, each layout runs
    with each strategy. With --checkpoint every lane saves in its own folder, and the time that this
    takes counts. The command shows a live table, then writes report.html, report.png and
    summary.json.

    \b
      farandole race -n 4 --pretend-hosts 2 --sync allreduce --sync local:every=8 --sync daso \\
                     --target accuracy=0.95 train.py
      farandole race -H node1:4,node2:4 --sync allreduce --sync daso train.py
      farandole race -n 4 --layout whole --layout stages=4,microbatches=8 \\
                     --target accuracy=0.95 train.py
      farandole race -n 4 --servers 2 --sync allreduce --sync server --target loss=0.3 train.py
    """
    if workers is not None and workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
    check_limits(stall, grace)
    check_script(script)

    from farandole.race.race import run_race

    sys.exit(
        run_race(
            (script, *arguments),
            layouts=layout,
            syncs=sync,
            workers=workers,
            serial=serial,
            target=target,
            runs=runs,
            checkpoint=checkpoint,
            seed=seed,
            where=where,
            pretend_hosts=pretend_hosts,
            servers=servers,
            replicas=replicas,
            stall=stall,
            grace=grace,
        )
    )

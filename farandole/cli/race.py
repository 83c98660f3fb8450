"""`farandole race`: the same script under each scheme; which reaches the target first?"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole.cli.options import (
    PASS_ON,
    check_script,
    hosts_option,
    layout_option,
    seed_option,
    sync_option,
)
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.race.runner import Entry, RaceConfig
    from farandole.report import Lane, Target


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, required=True, help="Workers for each lane.")
@layout_option(multiple=True)
@sync_option(multiple=True)
@click.option("--serial", is_flag=True, help="Also run the script on one worker, to compare with.")
@click.option(
    "--target",
    metavar="METRIC=VALUE",
    help='What to reach, such as accuracy=0.95 or "loss<=0.3"; the script must run.log it.',
)
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where runs are kept."
)
@seed_option(default=0)
@hosts_option()
@click.option(
    "--servers",
    type=int,
    metavar="N",
    help="Parameter servers for each strategy that needs them. [1]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Further copies of all that the servers hold, on other servers: so many may die. "
    "[1 with several servers, else 0]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def race(
    workers: int,
    layout: tuple[str, ...],
    sync: tuple[str, ...],
    serial: bool,
    target: str | None,
    runs: Path,
    seed: int,
    hosts: str | None,
    servers: int | None,
    replicas: int | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT under each strategy in turn, with the same seed and arguments, and say which
    reaches the target first. With layouts too, under each layout with each strategy.

    Shows a live table, then writes report.html, report.png and summary.json.

    \b
      farandole race -n 4 --hosts 2 --sync allreduce --sync local:every=8 --sync daso \\
                     --target accuracy=0.95 train.py
      farandole race -n 4 --layout whole --layout stages=4,microbatches=8 \\
                     --target accuracy=0.95 train.py
      farandole race -n 4 --servers 2 --sync allreduce --sync server --target loss=0.3 train.py
    """
    if workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
    check_script(script)

    import torch

    from farandole.race.checks import check_entries, check_servers
    from farandole.race.runner import Entry, RaceConfig
    from farandole.report import Target
    from farandole.train.claim import claim
    from farandole.train.settings import default_name
    from farandole.worker.signals import exit_code_of, signals_raised

    goal = Target.parse(target) if target else None
    entries = _entries(layout, sync, workers)
    check_servers(entries, servers, replicas)
    if serial:
        entries.insert(0, Entry(None, 1))  # what the others' speed-up is measured against
    if not entries:
        raise UserError(
            "a race needs runners: give --sync once for each strategy, --layout once for each "
            "layout, or --serial."
        )
    check_entries(entries, hosts, "cuda" if torch.cuda.device_count() else "cpu", os.environ)
    folder = claim(runs, f"race-{default_name(script)}")
    config = RaceConfig(
        (script, *arguments), folder.parent / folder.name, seed, hosts, servers, replicas
    )
    with signals_raised():
        try:
            lanes, stopped_by = _run_all(config, entries, goal)
        finally:
            config.warm.close()
    _finish(config, lanes, goal)
    if stopped_by is not None:
        sys.exit(exit_code_of(stopped_by))
    sys.exit(0 if all(lane.outcome == "ok" for lane in lanes) else 1)


def _entries(layouts: Sequence[str], syncs: Sequence[str], workers: int) -> list[Entry]:
    """Every layout with every strategy, as typed. What is not given is left to the script."""
    from farandole.launch.servers import needs_servers
    from farandole.race.runner import Entry
    from farandole.sync import parse

    if not layouts and not syncs:
        return []
    strategies: list[tuple[str | None, bool]] = [
        (text.strip(), needs_servers(parse(text))) for text in syncs
    ]
    places: list[str | None] = [text.strip() for text in layouts]
    return [
        Entry(sync, workers, needs, layout)
        for layout in places or [None]
        for sync, needs in strategies or [(None, False)]
    ]


def _run_all(
    config: RaceConfig, entries: list[Entry], target: Target | None
) -> tuple[list[Lane], str | None]:
    """All lanes in turn; the second value is the signal that stopped the race, if one did."""
    from rich.console import Console
    from rich.live import Live

    from farandole.race.runner import interrupted, run_lane
    from farandole.report import TargetNotice, require_metric, table
    from farandole.worker.signals import Stopped

    notice = TargetNotice(target)
    lanes = [config.lane(entry) for entry in entries]
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    at = 0
    try:
        begin = time.perf_counter()
        if config.warm.prepare({entry.workers for entry in entries}):
            click.echo(f"torch is imported once for all lanes: {time.perf_counter() - begin:.1f} s")
        if live:
            live.start()
        for at, entry in enumerate(entries):
            if not live:
                click.echo(f"{lanes[at].name} on {entry.workers} worker(s) …")
            for lane in run_lane(config, entry, at + 1):
                lanes[at] = lane
                if (line := notice.look(lane.history)) is not None:
                    console.print(line, style="yellow", markup=False, highlight=False)
                if live:
                    live.update(table(lanes, target, ranked=False), refresh=True)
            if not live:
                _tell(lanes[at], target)
            if target is not None and lanes[at].outcome == "ok":
                # Certain now: no lane will log what this one did not.
                require_metric(target, [lanes[at].history])
    except KeyboardInterrupt as stop:
        lanes[at] = interrupted(lanes[at])
        return lanes, stop.name if isinstance(stop, Stopped) else "SIGINT"
    finally:
        if live:
            live.stop()
    return lanes, None


def _tell(lane: Lane, target: Target | None) -> None:
    if lane.outcome != "ok":
        click.echo(f"  {lane.outcome}: {lane.problem}")
        return
    reached = target.reached(lane.history) if target else None
    told = "" if target is None else ", target not reached"
    if reached is not None:
        told = f", {target} after {reached:.1f} s"
    startup = lane.startup_seconds
    before = "" if startup is None else f", after {startup:.1f} s until fd.init() was done"
    click.echo(f"  {lane.total_seconds:.1f} s in all{told}{before}")


def _finish(config: RaceConfig, lanes: list[Lane], target: Target | None) -> None:
    from rich.console import Console

    import farandole
    from farandole.race.runner import output_of
    from farandole.report import Results, headline, plain, table
    from farandole.report.lane import labels
    from farandole.report.page import write_report

    facts = {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "farandole": farandole.__version__,
        "seed": str(config.seed),
    }
    console = Console()
    console.print(table(lanes, target))
    for number, (label, lane) in enumerate(zip(labels(lanes), lanes, strict=True), start=1):
        if lane.outcome in ("failed", "unfinished"):
            click.secho(f"{label}: {lane.problem}  ({output_of(config, number)})", fg="red")
    report = write_report(config.folder, lanes, target, facts)
    click.secho(plain(headline(Results(tuple(lanes), target))), bold=True)
    click.echo(f"report: {report}")

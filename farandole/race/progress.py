"""Runs the lanes of a race in turn, and shows how they get on."""

from __future__ import annotations

import time

import click
from rich.console import Console
from rich.live import Live

from farandole.race import runner
from farandole.race.runner import Entry, RaceConfig
from farandole.report.lane import Lane
from farandole.report.notice import TargetNotice
from farandole.report.standing import require_metric
from farandole.report.summary import table
from farandole.report.target import Target
from farandole.worker.signals import Stopped


def run_all(
    config: RaceConfig, entries: list[Entry], target: Target | None
) -> tuple[list[Lane], str | None]:
    """All lanes in turn; the second value is the signal that stopped the race, if one did."""
    notice = TargetNotice(target)
    lanes = [config.lane(entry) for entry in entries]
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    at = 0
    try:
        begin = time.perf_counter()
        counts = {entry: config.workers_here(entry) for entry in entries}
        alone = all(count == entry.workers for entry, count in counts.items())
        if config.warm.prepare(set(counts.values()), alone=alone):
            click.echo(f"torch is imported once for all lanes: {time.perf_counter() - begin:.1f} s")
        if live:
            live.start()
        for at, entry in enumerate(entries):
            if not live:
                click.echo(f"{lanes[at].name} on {entry.workers} worker(s) …")
            for lane in runner.run_lane(config, entry, at + 1):
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
        lanes[at] = runner.interrupted(lanes[at])
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
    target_text = "" if target is None else ", target not reached"
    if reached is not None:
        target_text = f", {target} after {reached:.1f} s"
    startup = lane.startup_seconds
    before = "" if startup is None else f", after {startup:.1f} s until fd.init() was done"
    click.echo(f"  {lane.total_seconds:.1f} s in all{target_text}{before}")

"""Runs the lanes of a race in turn, and shows how they get on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.live import Live

from farandole.race import runner
from farandole.race.plan import PlannedRun
from farandole.race.runner import Entry, RaceConfig
from farandole.report.lane import Lane
from farandole.report.notice import TargetNotice
from farandole.report.standing import require_metric
from farandole.report.summary import table
from farandole.report.target import Target
from farandole.worker.signals import Stopped


def run_all(
    config: RaceConfig,
    runs: Sequence[PlannedRun],
    target: Target | None,
    on_end: Callable[[PlannedRun, Lane], None],
) -> tuple[list[Lane], str | None]:
    """All runs in turn; the second value is the signal that stopped the race, if one did.

    `on_end` hears of each run that is over, before the next one starts.
    """
    notice = TargetNotice(target)
    lanes = [config_of(config, run).lane(run.entry) for run in runs]
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    at = 0
    try:
        _prepare(config, {run.entry for run in runs})
        if live:
            live.start()
        for at, run in enumerate(runs):
            if not live:
                seed = f", seed {run.seed}" if len({run.seed for run in runs}) > 1 else ""
                click.echo(f"{lanes[at].name} on {run.entry.workers} worker(s){seed} …")
            for lane in runner.run_lane(config_of(config, run), run.entry, run.number):
                lanes[at] = lane
                if (line := notice.look(lane.history)) is not None:
                    console.print(line, style="yellow", markup=False, highlight=False)
                if live:
                    same = [lanes[i] for i, r in enumerate(runs) if r.seed == run.seed]
                    live.update(table(same, target, ranked=False), refresh=True)
            on_end(run, lanes[at])
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


def config_of(config: RaceConfig, run: PlannedRun) -> RaceConfig:
    """What one run starts with. The runs of the race's own seed have the plain folders."""
    suffix = "" if run.seed == config.seed else f"-seed-{run.seed}"
    return replace(config, seed=run.seed, budget_seconds=run.budget_seconds, folder_suffix=suffix)


def _prepare(config: RaceConfig, entries: Collection[Entry]) -> None:
    begin = time.perf_counter()
    counts = {entry: config.workers_here(entry) for entry in entries}
    alone = all(count == entry.workers for entry, count in counts.items())
    if config.warm.prepare(set(counts.values()), alone=alone):
        click.echo(f"torch is imported once for all lanes: {time.perf_counter() - begin:.1f} s")


def _tell(lane: Lane, target: Target | None) -> None:
    if lane.outcome not in ("ok", "stopped"):
        click.echo(f"  {lane.outcome}: {lane.problem}")
        return
    reached = target.reached(lane.history) if target else None
    target_text = "" if target is None else ", target not reached"
    if reached is not None:
        target_text = f", {target} after {reached:.1f} s"
    startup = lane.startup_seconds
    before = "" if startup is None else f", after {startup:.1f} s until fd.init() was done"
    ended = f", {lane.problem}" if lane.outcome == "stopped" else ""
    click.echo(f"  {lane.total_seconds:.1f} s in all{target_text}{before}{ended}")

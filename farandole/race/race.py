"""A race from its first check to its report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console

import farandole
from farandole.errors import UserError
from farandole.launch.host_facts import JobFiles
from farandole.launch.placement.placement import Placement, place
from farandole.launch.probes.crowding import warn_if_crowded
from farandole.launch.probes.preflight import check_hosts
from farandole.race.checks import check_entries, check_servers, checked_policy
from farandole.race.execution import RaceExecution
from farandole.race.lanes import all_entries, read_lane
from farandole.race.options import RaceOptions, check_price
from farandole.race.plan import read_seeds
from farandole.race.record import RaceRecord, locked, read_record
from farandole.race.results import show
from farandole.race.runner import Entry, RaceConfig
from farandole.race.shared_folder import check_shared
from farandole.report.lane import Lane, labels
from farandole.report.page import write_report
from farandole.report.target import Target
from farandole.train.claim import claim
from farandole.train.settings import default_name
from farandole.worker.signals import exit_code_of, signals_raised


def run_race(options: RaceOptions) -> int:
    """Runs every lane, writes the report, and returns the exit code.

    Raises `UserError` before the first lane starts.
    """
    old = None if options.resume is None else read_record(options.resume)
    if old is not None:
        options = options.resumed(old)
    goal = Target.parse(options.target) if options.target else None
    _check_limits(options, goal)
    check_price(options.price)
    policy = checked_policy(options.checkpoint, os.environ)
    placement = place(options.where, options.workers)
    entries = _entries(options, old, _count(options.workers, placement))
    seeds = _seeds(options, old)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    check_entries(entries, options.pretend_hosts, device, os.environ, options.where)
    if placement is None:
        warn_if_crowded(max(entry.workers for entry in entries), "-n ")
    else:
        check_hosts(placement, JobFiles(str(Path.cwd()), options.command[0]))
    folder = _folder(options, placement)
    config = RaceConfig(
        options.command,
        folder,
        options.seed or 0,
        options.pretend_hosts,
        options.servers,
        options.replicas,
        link=options.link,
        where=options.where,
        checkpoint=policy,
        stall_seconds=options.stall,
        grace_seconds=options.grace,
        stop_at=goal if options.stop_at_target else None,
        price=options.price,
        trace=options.trace,
    )
    record = RaceRecord(
        options.command,
        tuple(entries),
        seeds,
        options.target,
        settings=options.settings(),
        facts=_facts(placement),
        runs=() if old is None else old.runs,
        price=options.price,
    )
    with locked(folder):
        return _race(config, record, goal, options, placement)


def _race(
    config: RaceConfig,
    record: RaceRecord,
    goal: Target | None,
    options: RaceOptions,
    placement: Placement | None,
) -> int:
    execution = RaceExecution(config, record, goal)
    with signals_raised():
        try:
            if options.halve:
                assert options.budget is not None
                stopped_by = execution.halve(options.budget)
            else:
                stopped_by = execution.run(options.budget)
        finally:
            config.warm.close()
    lanes = execution.lanes()
    finish(config, lanes, goal, placement, execution.outputs())
    if stopped_by is not None:
        click.echo(f"to go on: farandole race --resume {shlex.quote(str(config.folder))}")
        return exit_code_of(stopped_by)
    return 0 if all(lane.outcome in ("ok", "stopped") for lane in lanes) else 1


def _check_limits(options: RaceOptions, goal: Target | None) -> None:
    if options.stop_at_target and goal is None:
        raise UserError("--stop-at-target: say what the target is, such as --target accuracy=0.95.")
    if options.budget is not None and not 0 < options.budget < float("inf"):
        raise UserError(f"--budget {options.budget:g}: give the seconds of a lane, above 0.")
    if options.halve and options.budget is None:
        raise UserError("--halve: say with --budget SECONDS how long the last lanes may run.")


def _entries(options: RaceOptions, old: RaceRecord | None, workers: int) -> list[Entry]:
    """All lanes: those of the race that is resumed first, in their places."""
    before = [] if old is None else list(old.entries)
    given = all_entries(options.layouts, options.syncs, workers)
    given += [read_lane(text, workers) for text in options.lanes]
    entries = before + [entry for entry in given if old is None or entry not in before]
    check_servers(entries, options.servers, options.replicas)
    if options.serial and not any(entry.serial for entry in entries):
        # The speed-up of the others is over the first one. Lanes that have run keep their places.
        entries.insert(len(before), Entry(None, 1))
    if not entries:
        raise UserError(
            "a race needs lanes: give --sync once for each strategy, --layout once for each "
            "layout, or --serial."
        )
    return entries


def _seeds(options: RaceOptions, old: RaceRecord | None) -> tuple[int, ...]:
    if old is None:
        return read_seeds(options.seeds, options.seed or 0)
    if options.seeds is None:
        return old.seeds
    return tuple(dict.fromkeys((*old.seeds, *read_seeds(options.seeds, options.seed or 0))))


def _folder(options: RaceOptions, placement: Placement | None) -> Path:
    if options.resume is not None:
        return options.resume
    folder = claim(options.runs, f"race-{default_name(options.command[0])}")
    if placement is not None:
        check_shared(placement, folder)
    made = folder.parent / folder.name
    made.mkdir(parents=True, exist_ok=True)
    return made


def _count(workers: int | None, placement: Placement | None) -> int:
    if placement is not None:
        return placement.topology.size
    if workers is None:
        raise UserError("how many workers has each lane? Give -n 2, say, or hosts: -H node1:4.")
    return workers


def _facts(placement: Placement | None) -> dict[str, str]:
    return {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **({} if placement is None else {"hosts": str(placement.topology)}),
        "farandole": farandole.__version__,
    }


def finish(
    config: RaceConfig,
    lanes: list[Lane],
    target: Target | None,
    placement: Placement | None = None,
    outputs: Sequence[Path] = (),
) -> None:
    """Shows the results and writes the report."""
    facts = {**_facts(placement), "seed": str(config.seed)}
    for label, lane, output in zip(labels(lanes), lanes, outputs, strict=True):
        if lane.outcome in ("failed", "unfinished"):
            click.secho(f"{label}: {lane.problem}  ({output})", fg="red")
    report = write_report(config.folder, lanes, target, facts)
    show(lanes, target, Console())
    click.echo(f"report: {report}")

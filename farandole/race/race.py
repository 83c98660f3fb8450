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
from farandole.launch.placement.placement import HostOptions, Placement, place
from farandole.launch.probes.crowding import warn_if_crowded
from farandole.launch.probes.preflight import check_hosts
from farandole.launch.servers import needs_servers
from farandole.race.checks import check_entries, check_servers, checked_policy
from farandole.race.progress import run_all
from farandole.race.runner import Entry, RaceConfig, output_of
from farandole.race.shared_folder import check_shared
from farandole.report.lane import Lane, labels
from farandole.report.page import write_report
from farandole.report.standing import Results
from farandole.report.summary import headline, plain, table
from farandole.report.target import Target
from farandole.sync import parse
from farandole.train.claim import claim
from farandole.train.settings import default_name
from farandole.worker.grace import DEFAULT_SECONDS
from farandole.worker.signals import exit_code_of, signals_raised


def run_race(
    command: tuple[str, ...],
    *,
    layouts: Sequence[str],
    syncs: Sequence[str],
    workers: int | None,
    serial: bool,
    target: str | None,
    runs: Path,
    seed: int,
    where: HostOptions,
    pretend_hosts: str | None,
    servers: int | None,
    replicas: int | None,
    checkpoint: str | None = None,
    stall: float | None = None,
    grace: float = DEFAULT_SECONDS,
) -> int:
    """Runs every lane, writes the report, and returns the exit code.

    `command` is the script and its arguments. Raises `UserError` before the first lane starts.
    """
    goal = Target.parse(target) if target else None
    policy = checked_policy(checkpoint, os.environ)
    placement = place(where, workers)
    entries = all_entries(layouts, syncs, _count(workers, placement))
    check_servers(entries, servers, replicas)
    if serial:
        entries.insert(0, Entry(None, 1))  # the speed-up of the others is relative to this one
    if not entries:
        raise UserError(
            "a race needs lanes: give --sync once for each strategy, --layout once for each "
            "layout, or --serial."
        )
    device = "cuda" if torch.cuda.device_count() else "cpu"
    check_entries(entries, pretend_hosts, device, os.environ, where)
    if placement is None:
        warn_if_crowded(max(entry.workers for entry in entries), "-n ")
    else:
        check_hosts(placement, JobFiles(str(Path.cwd()), command[0]))
    folder = claim(runs, f"race-{default_name(command[0])}")
    if placement is not None:
        check_shared(placement, folder)
    config = RaceConfig(
        command,
        folder.parent / folder.name,
        seed,
        pretend_hosts,
        servers,
        replicas,
        where=where,
        checkpoint=policy,
        stall_seconds=stall,
        grace_seconds=grace,
    )
    with signals_raised():
        try:
            lanes, stopped_by = run_all(config, entries, goal)
        finally:
            config.warm.close()
    finish(config, lanes, goal, placement)
    if stopped_by is not None:
        return exit_code_of(stopped_by)
    return 0 if all(lane.outcome == "ok" for lane in lanes) else 1


def all_entries(layouts: Sequence[str], syncs: Sequence[str], workers: int) -> list[Entry]:
    """Every layout with every strategy, as typed. What is not given is left to the script."""
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


def _count(workers: int | None, placement: Placement | None) -> int:
    if placement is not None:
        return placement.topology.size
    if workers is None:
        raise UserError("how many workers has each lane? Give -n 2, say, or hosts: -H node1:4.")
    return workers


def finish(
    config: RaceConfig,
    lanes: list[Lane],
    target: Target | None,
    placement: Placement | None = None,
) -> None:
    """Shows the results and writes the report."""
    facts = {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **({} if placement is None else {"hosts": str(placement.topology)}),
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

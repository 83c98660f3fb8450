"""A scaling study from its options to its files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from farandole.bench.ends import stopped
from farandole.bench.scaling.plan import Cell
from farandole.bench.scaling.show import picture, table
from farandole.bench.scaling.study import Row, ScalingStudy, as_json, curves, run_study
from farandole.bench.throughput import Workload
from farandole.errors import LaunchError, UserError
from farandole.files import write_whole
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch
from farandole.launch.placement.launch import launch_placed
from farandole.launch.placement.placement import HostOptions, place
from farandole.launch.probes.crowding import places_here
from farandole.report.plots import render
from farandole.system.cores import fair_share
from farandole.train.run_metrics import versions


def measure_scaling(
    cells: Sequence[Cell],
    workload: Workload,
    epoch_images: int,
    where: HostOptions,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measures, prints, and writes. Raises `LaunchError` at the end where something failed.

    What was measured before Ctrl-C is shown and written too.
    """
    if epoch_images < 1:
        raise UserError(f"--epoch-images {epoch_images}: give 1 or more.")
    placements = {cell.workers: place(where, cell.workers) for cell in cells}
    elsewhere = next((p for p in placements.values() if p is not None), None)
    if elsewhere is not None and not elsewhere.rank0_is_here:
        raise UserError(
            f"rank 0 is on host {elsewhere.topology.host(0).name}, and would write its figures "
            "there. Put this host first in -H."
        )
    kind, count = places_here()
    if elsewhere is not None:
        kind, count = "slot", max(cell.workers for cell in cells)
    if max(cell.workers for cell in cells) > count:
        click.echo(f"note: above {count} workers they share the {kind}s of this machine")

    def run_job(job: Job) -> Outcome:
        placement = placements[job.workers]
        return launch(job) if placement is None else launch_placed(job, placement)

    variables = {} if elsewhere is not None or kind == "GPU" else _same_threads(cells)
    for text in variables.values():
        click.echo(f"threads of each worker: {text}, the same for all numbers of workers")
    study = run_study(cells, workload, epoch_images, run_job, _tell, variables)
    if study.rows:
        Console().print(table(study.rows, epoch_images, (kind, count)))
        _write(study, workload, epoch_images, (kind, count), json_file, plot_file)
    if study.stopped_by is not None:
        stopped(study.stopped_by)
    failed = [row for row in study.rows if row.problem]
    if failed:
        raise LaunchError("\n".join(f"{_name(row)} failed: {row.problem}" for row in failed))


def _same_threads(cells: Sequence[Cell]) -> dict[str, str]:
    """One worker alone would take all cores, and two could never be twice as fast."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(fair_share(max(cell.workers for cell in cells)))}


def _tell(row: Row) -> None:
    if row.images_per_second is None:
        click.echo(f"{_name(row)}: failed")
        return
    share = "" if row.efficiency is None else f", efficiency {row.efficiency:.1%}"
    click.echo(f"{_name(row)}: {row.images_per_second:.1f} images/s{share}")


def _name(row: Row) -> str:
    curve = row.cell.curve
    sync = curve.sync or "allreduce"
    return f"{curve.model}, {sync}, {curve.scaling}, {row.cell.workers} worker(s)"


def _write(
    study: ScalingStudy,
    workload: Workload,
    epoch_images: int,
    places: tuple[str, int],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    if json_file is not None:
        settings = {k: v for k, v in asdict(workload).items() if k not in ("model", "quiet")}
        facts = {
            "command": shlex.join(["farandole", *sys.argv[1:]]),
            "settings": {**settings, "epoch_images": epoch_images},
            "machine": {"cpus": os.cpu_count(), places[0] + "s": places[1]},
            "versions": versions(),
            "stopped_by": study.stopped_by,
        }
        write_whole(json_file, as_json(study, facts))
    if plot_file is not None and curves(study.rows):
        title = "training on synthetic images"
        drawn = render.picture(
            plot_file, lambda: picture(study.rows, epoch_images, title, places), "scaling"
        )
        write_whole(plot_file, drawn)
        click.echo(f"picture: {plot_file}")

"""Runs the measurements of a scaling study in turn, and works out what they say.

Each is a job of its own. One that fails has its reason in its place, and the others go on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farandole import environment
from farandole.bench.scaling.plan import Cell, Curve
from farandole.bench.throughput import Workload
from farandole.launch.job import Job, Outcome
from farandole.options import format_options


@dataclass(frozen=True)
class Row:
    """A cell, and what was measured: images per second of all workers, ± 1.96 deviations.

    `efficiency` is against the same curve at its smallest number of workers.
    """

    cell: Cell
    images_per_second: float | None = None
    margin: float = 0.0
    epoch_seconds: float | None = None
    efficiency: float | None = None
    waited_share: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class ScalingStudy:
    """`stopped_by` is the signal that ended it early, if one did."""

    rows: list[Row]
    stopped_by: str | None = None


def run_study(
    cells: Sequence[Cell],
    workload: Workload,
    epoch_images: int,
    launch: Callable[[Job], Outcome],
    on_row: Callable[[Row], None],
    variables: Mapping[str, str] | None = None,
) -> ScalingStudy:
    """`launch` runs a job on the hosts of the study. `on_row` hears of each row as it comes.

    All workers get the `variables`. What both kinds of scaling have in common is measured once.
    """
    rows: list[Row] = []
    known: dict[tuple[str, str, int, int], Row] = {}
    for cell in cells:
        curve = cell.curve
        key = (curve.model, curve.sync, cell.workers, cell.batch_size)
        if key not in known:
            measured, stopped_by = _measure(cell, workload, launch, variables or {})
            if stopped_by is not None:
                return ScalingStudy(rows, stopped_by)
            known[key] = measured
        row = _with_epoch(replace(known[key], cell=cell), epoch_images)
        first = next((r for r in rows if r.cell.curve == curve), row)
        rows.append(replace(row, efficiency=_efficiency(row, first)))
        on_row(rows[-1])
    return ScalingStudy(rows)


def _measure(
    cell: Cell,
    workload: Workload,
    launch: Callable[[Job], Outcome],
    variables: Mapping[str, str],
) -> tuple[Row, str | None]:
    own = replace(workload, model=cell.curve.model, batch_size=cell.batch_size, quiet=True)
    with tempfile.TemporaryDirectory(prefix="farandole-scaling-") as folder:
        result = Path(folder) / "result.json"
        job = Job(
            workers=cell.workers,
            command=["-m", "farandole.bench.throughput", format_options(own), str(result)],
            environment={
                environment.SCRIPT: "bench train",
                environment.SYNC: cell.curve.sync,
                **variables,
            },
            rank0_owns_terminal=True,
        )
        outcome = launch(job)
        if outcome.stopped_by is not None:
            return Row(cell), outcome.stopped_by
        if outcome.failure is not None:
            return Row(cell, problem=str(outcome.failure)), None
        return _row(cell, json.loads(result.read_text())), None


def _row(cell: Cell, found: dict[str, Any]) -> Row:
    total, each = found["images_per_second_total"], found["images_per_second_per_worker"]
    images = found["settings"]["batches_per_iteration"] * cell.batch_size
    seconds = sum(images / rate for rate in each["iterations"])
    return Row(
        cell,
        images_per_second=total["mean"],
        margin=total["ci"],
        waited_share=found["waited_seconds"] / seconds,
    )


def _with_epoch(row: Row, images: int) -> Row:
    rate = row.images_per_second
    return row if rate is None else replace(row, epoch_seconds=images / rate)


def _efficiency(row: Row, first: Row) -> float | None:
    """Of the workers: 1 where n times the workers are n times as fast, weak and strong alike."""
    if row.images_per_second is None or first.images_per_second is None:
        return None
    ideal = first.images_per_second * row.cell.workers / first.cell.workers
    return row.images_per_second / ideal


def as_json(study: ScalingStudy, facts: dict[str, Any]) -> bytes:
    rows = [{**asdict(row.cell.curve), **_flat(row)} for row in study.rows]
    return json.dumps({"format": 1, **facts, "rows": rows}, indent=2).encode() + b"\n"


def _flat(row: Row) -> dict[str, Any]:
    values = asdict(row)
    cell = values.pop("cell")
    return {"workers": cell["workers"], "batch_size": cell["batch_size"], **values}


def curves(rows: Sequence[Row]) -> dict[Curve, list[Row]]:
    """The rows of each curve that were measured."""
    found: dict[Curve, list[Row]] = {}
    for row in rows:
        if row.images_per_second is not None:
            found.setdefault(row.cell.curve, []).append(row)
    return found

"""What each rank of `farandole bench comm` does, whoever started it."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import farandole
from farandole.bench.comm.measure import measure
from farandole.bench.comm.plan import BenchPlan
from farandole.bench.comm.rows import Row
from farandole.bench.comm.sides import Gloo, Mpi, Nccl, Side
from farandole.bench.comm.sizes import format_size
from farandole.comm.gpu_sharing import nccl_text
from farandole.environment import LAUNCHER
from farandole.errors import FarandoleError, UserError
from farandole.files import write_whole
from farandole.system.cores import usable_cores
from farandole.system.orphans import end_with_launcher
from farandole.train.run import Run
from farandole.train.start import init
from farandole.worker.environment import detect


def take_part(
    plan: BenchPlan, command: str, json_path: Path | None, plot_path: Path | None
) -> None:
    """Joins the job, measures, and on rank 0 prints as it goes and writes the files at the end.

    Raises `FarandoleError` at the end when a result of ours was wrong; it is written down all the
    same, and marked.
    """
    if LAUNCHER in os.environ:
        end_with_launcher(os.environ)
    if detect(os.environ).size == 1:
        raise UserError(
            "--here: this process is alone, and an all-reduce needs 2 ranks or more. Start it by "
            "a launcher (torchrun, mpirun, srun), or leave --here out and give -n."
        )
    run = init(timeout=plan.timeout_seconds)
    mpi = Mpi(run.group) if "mpi" in plan.against else None
    sides: dict[str, Side] = {"gloo": Gloo()} if "gloo" in plan.against else {}
    if plan.device != "cpu" and run.device.type != plan.device:
        raise UserError(f"--device {plan.device}: PyTorch finds no such device here.")
    if "nccl" in plan.against:
        sides["nccl"] = Nccl(run.group)
    if mpi is not None:
        sides["mpi"] = mpi
    try:
        rows = _measure(run, plan, [sides[name] for name in plan.against])
    except BaseException:
        if mpi is not None:
            mpi.abandon()
        raise
    if run.rank == 0:
        hosts = len(run.topology.hosts)
        record = {
            "command": command,
            "environment": environment() | ({"mpi": mpi.library} if mpi else {}),
            "settings": {
                "dtype": plan.dtype,
                "memory": plan.memory_used,
                "device": plan.device,
                "repeats": plan.repeats,
            },
            "rows": [row.record() | {"hosts": hosts, "memory": plan.memory_used} for row in rows],
        }
        if json_path is not None:
            _write(json_path, json.dumps(record, indent=2).encode() + b"\n")
        if plot_path is not None:
            from farandole.bench.comm.plot import speeds
            from farandole.report.plots.render import png

            _write(plot_path, png(lambda: speeds(rows, _where(run, plan))))
    wrong = [f"{row.algorithm} at {format_size(row.bytes)}" for row in rows if not row.correct]
    if wrong:
        raise FarandoleError(f"wrong results: {', '.join(wrong)}. That is a defect; report it.")


def _measure(run: Run, plan: BenchPlan, rivals: list[Side]) -> list[Row]:
    from farandole.bench.comm.table import Printer

    printer = Printer(plan) if run.rank == 0 else None
    if printer is not None:
        printer.say(f"{_where(run, plan)}; median of {plan.repeats} repeats, slowest rank")
        printer.heading()
    rows: list[Row] = []
    for found in measure(run.group, plan, rivals):
        rows += found
        if printer is not None:
            printer.rows(found)
    if printer is not None:
        printer.say(_verdict(rows))
    return rows


def _where(run: Run, plan: BenchPlan) -> str:
    hosts = len(run.topology.hosts)
    where = f"{hosts} host{'s' if hosts > 1 else ''}"
    memory = f"{plan.memory} memory"
    if plan.device == "cuda":
        memory = f"on GPUs, NCCL {nccl_text()}"
    return f"{run.size} ranks on {where}, {plan.dtype}, {memory}"


def _verdict(rows: list[Row]) -> str:
    names = {name for row in rows for name, right in row.against_correct.items() if not right}
    others = f" Wrong from {', '.join(sorted(names))}." if names else ""
    if all(row.correct for row in rows):
        return f"every result was right, with the same bits on all ranks.{others}"
    return f"{sum(not row.correct for row in rows)} of {len(rows)} rows had WRONG results.{others}"


def environment() -> dict[str, Any]:
    """The machine and the versions, so that a figure can be judged later."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpus": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "farandole": farandole.__version__,
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except FarandoleError as error:
        raise FarandoleError(
            f"{path} could not be written ({error.__cause__}). What was measured stands above."
        ) from error

"""`farandole bench comm`: all-reduces by size, against gloo and MPI in the same processes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole import environment
from farandole.bench.ends import check_output, finish, stopped
from farandole.errors import LaunchError, UserError

if TYPE_CHECKING:
    from farandole.bench.comm.plan import BenchPlan


@click.command()
@click.option(
    "-n",
    "--workers",
    type=int,
    help="Number of ranks on this host, 2 or more. Required without --here.",
)
@click.option(
    "--sizes",
    default="4KiB:64MiB",
    show_default=True,
    metavar="SIZES",
    help="Bytes on each rank: a range, whose sizes grow by a factor of four, or a list such as "
    "4KiB,1MiB.",
)
@click.option(
    "--algorithms",
    default="auto",
    show_default=True,
    metavar="NAMES",
    help="Farandole's algorithms to time, separated by commas: auto, native, ring, "
    "halving_doubling, …",
)
@click.option(
    "--against",
    default="gloo",
    show_default=True,
    metavar="NAMES",
    help="Libraries to compare with: gloo, mpi, both separated by a comma, or an empty text for "
    "none. With mpi, mpirun starts the ranks.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    metavar="NAME",
    help="Data type of the tensors.",
)
@click.option(
    "--memory",
    default="registered",
    show_default=True,
    metavar="KIND",
    help="Memory of Farandole's tensors: registered (with the group, as gradients are) or plain.",
)
@click.option(
    "--repeats",
    type=int,
    default=20,
    show_default=True,
    help="Number of measurements of each side.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a rank waits for another one, in seconds.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write every row to FILE.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plot times and ratios to FILE, a PNG.",
)
@click.option(
    "--here",
    is_flag=True,
    help="Run as one rank of a job that another launcher has started. Leave out -n.",
)
@click.option("--command", "started_as", hidden=True, help="The command to record in the result.")
def comm(
    workers: int | None,
    sizes: str,
    algorithms: str,
    against: str,
    dtype: str,
    memory: str,
    repeats: int,
    timeout_seconds: float,
    json_path: Path | None,
    plot_path: Path | None,
    here: bool,
    started_as: str | None,
) -> None:
    """Time all-reduces of many sizes on CPU tensors, and compare them with gloo and MPI.

    All sides run in the same processes and take turns. The reported time is the median over the
    repeats of the slowest rank's time. Every result is checked.

    \b
      farandole bench comm -n 4
      farandole bench comm -n 4 --sizes 4KiB:64MiB --against gloo,mpi --algorithms auto,ring \\
        --json comm.json --plot comm.png
      torchrun --nproc-per-node 4 -m farandole bench comm --here
    """
    if here and workers is not None:
        raise UserError(f"--here: the launcher says how many ranks there are; leave -n {workers}.")
    if not here and workers is None:
        raise UserError("how many ranks? Give -n, such as -n 4.")
    if workers is not None and workers < 2:
        raise UserError(f"-n {workers}: an all-reduce needs at least 2 ranks.")
    if plot_path is not None and plot_path.suffix != ".png":
        raise UserError(f"--plot {plot_path}: the picture is a PNG; give a name ending in .png.")

    from farandole.bench.comm.plan import BenchPlan, names
    from farandole.bench.comm.sizes import parse_sizes
    from farandole.worker.environment import detect

    plan = BenchPlan(
        sizes=parse_sizes(sizes),
        algorithms=names(algorithms),
        against=names(against),
        dtype=dtype,
        memory=memory,
        repeats=repeats,
        timeout_seconds=timeout_seconds,
    )
    writes = not here or detect(os.environ).rank == 0  # other hosts may not have the folder
    json_file = check_output("--json", json_path) if json_path and writes else None
    plot_file = check_output("--plot", plot_path) if plot_path and writes else None
    command = started_as or shlex.join(["farandole", *sys.argv[1:]])
    if workers is None:
        from farandole.bench.comm.rank import take_part

        take_part(plan, command, json_file, plot_file)
        return
    words = ["-m", "farandole", "bench", "comm", "--here", *plan.arguments(), "--command", command]
    words += ["--json", str(json_file)] if json_file else []
    words += ["--plot", str(plot_file)] if plot_file else []
    _start(plan, workers, words)


def _start(plan: BenchPlan, workers: int, words: list[str]) -> None:
    variables = {environment.SCRIPT: "bench comm"}
    if "mpi" in plan.against:
        from farandole.launch.backends.mpi import mpirun
        from farandole.launch.backends.mpi.one_host import one_host_variables

        variables |= one_host_variables()
        mpirun.require_mpi4py("--against mpi")
        found = mpirun.require(
            "--against mpi", "Start it yourself: mpirun -n 4 farandole bench comm --here …"
        )
        end = mpirun.run(mpirun.command(found, workers, [sys.executable, *words]), variables)
        if end.stopped_by is not None:
            stopped(end.stopped_by)
        if end.exit_code:
            raise LaunchError(f"the benchmark failed: mpirun ended with exit code {end.exit_code}.")
        return

    from farandole.launch.launcher import Job, launch

    # Only rank 0 prints, so its lines need no prefix.
    finish(launch(Job(workers, words, variables, rank0_owns_terminal=True)))

"""`farandole bench comm`: all-reduces by size, against others' in the same processes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from farandole import environment
from farandole.bench.ends import check_output, run_placed, stopped
from farandole.cli.host_options import host_options
from farandole.errors import LaunchError, UserError
from farandole.launch.placement.placement import HostOptions, Placement, place


@click.command()
@click.option(
    "-n",
    "--workers",
    type=int,
    help="Number of ranks, 2 or more. Required without hosts and without --here. "
    "[all slots of the hosts]",
)
@host_options
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
    metavar="NAMES",
    help="Libraries to compare with: gloo, mpi, both separated by a comma, or an empty text for "
    "none. With mpi, mpirun starts the ranks. With --device cuda: nccl. [gloo; on GPUs nccl]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the tensors are. On GPUs the times are those of the device.",
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
    where: HostOptions,
    sizes: str,
    algorithms: str,
    against: str | None,
    device: str,
    dtype: str,
    memory: str,
    repeats: int,
    timeout_seconds: float,
    json_path: Path | None,
    plot_path: Path | None,
    here: bool,
    started_as: str | None,
) -> None:
    """Time all-reduces of many sizes, and compare them with gloo and MPI, on GPUs with NCCL.

    All sides run in the same processes and take turns. The reported time is the median over the
    repeats of the slowest rank's time. Every result is checked.

    \b
      farandole bench comm -n 4
      farandole bench comm -H node1:4,node2:4
      farandole bench comm -n 2 --device cuda
      farandole bench comm -n 4 --sizes 4KiB:64MiB --against gloo,mpi --algorithms auto,ring \\
        --json comm.json --plot comm.png
      torchrun --nproc-per-node 4 -m farandole bench comm --here
    """
    placement = None if here else place(where, workers)
    count = workers if placement is None else placement.topology.size
    _check_ranks(count, where, here=here)
    if plot_path is not None and plot_path.suffix != ".png":
        raise UserError(f"--plot {plot_path}: the picture is a PNG; give a name ending in .png.")

    from farandole.bench.comm.plan import BenchPlan, names
    from farandole.bench.comm.sizes import parse_sizes
    from farandole.worker.environment import detect

    plan = BenchPlan(
        sizes=parse_sizes(sizes),
        algorithms=names(algorithms),
        against=names({"cpu": "gloo", "cuda": "nccl"}[device] if against is None else against),
        device=device,
        dtype=dtype,
        memory=memory,
        repeats=repeats,
        timeout_seconds=timeout_seconds,
    )
    writes = not here or detect(os.environ).rank == 0  # other hosts may not have the folder
    json_file = check_output("--json", json_path) if json_path and writes else None
    plot_file = check_output("--plot", plot_path) if plot_path and writes else None
    command = started_as or shlex.join(["farandole", *sys.argv[1:]])
    if count is None:
        from farandole.bench.comm.rank import take_part

        take_part(plan, command, json_file, plot_file)
        return
    words = ["-m", "farandole", "bench", "comm", "--here", *plan.arguments(), "--command", command]
    outputs = {"--json": json_file, "--plot": plot_file}
    written = {option: str(file) for option, file in outputs.items() if file is not None}
    words += [word for pair in written.items() for word in pair]
    variables = {environment.SCRIPT: "bench comm"}
    if "mpi" in plan.against:
        _start_by_mpirun(count, words, variables, placement)
        return

    from farandole.launch.job import Job

    # Only rank 0 prints, so its lines need no prefix.
    job = Job(count, words, variables, rank0_owns_terminal=True)
    run_placed(job, placement, *(f"{option} {file}" for option, file in written.items()))


def _check_ranks(count: int | None, where: HostOptions, *, here: bool) -> None:
    """Raises `UserError` for numbers and hosts that cannot be."""
    if here and count is not None:
        raise UserError(f"--here: the launcher says how many ranks there are; leave -n {count}.")
    if here and where != HostOptions():
        raise UserError("--here: the launcher says where the ranks are; leave out -H and the like.")
    if not here and count is None:
        raise UserError("how many ranks? Give -n, such as -n 4, or hosts: -H node1:4,node2:4.")
    if count is not None and count < 2:
        raise UserError(f"-n {count}: an all-reduce needs at least 2 ranks.")


def _start_by_mpirun(
    workers: int, words: list[str], variables: dict[str, str], placement: Placement | None
) -> None:
    if placement is not None and placement.others:
        raise UserError(
            f"--against mpi: mpirun starts ranks on this host only, and there is "
            f"{', '.join(placement.others)}. Leave mpi out of --against, or start mpirun yourself: "
            "mpirun … farandole bench comm --here"
        )

    from farandole.launch.backends.mpi import mpirun
    from farandole.launch.backends.mpi.one_host import one_host_variables

    mpirun.require_mpi4py("--against mpi")
    found = mpirun.require(
        "--against mpi", "Start it yourself: mpirun -n 4 farandole bench comm --here …"
    )
    command = mpirun.command(found, workers, [sys.executable, *words])
    end = mpirun.run(command, variables | one_host_variables())
    if end.stopped_by is not None:
        stopped(end.stopped_by)
    if end.exit_code:
        raise LaunchError(f"the benchmark failed: mpirun ended with exit code {end.exit_code}.")

"""`farandole bench`: measures training throughput and the speed of communication."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farandole import environment
from farandole.bench.ends import check_output, run_placed
from farandole.cli.bench_comm import comm
from farandole.cli.bench_data import data
from farandole.cli.host_options import host_options
from farandole.cli.job.per_gpu import refuse_allocation, refuse_hosts
from farandole.cli.options import sync_option
from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions, place

if TYPE_CHECKING:
    from farandole.bench.throughput import Workload
    from farandole.launch.gpu.sharing import GpuSharing


@click.group()
def bench() -> None:
    """Measure training throughput or all-reduce times, on this host or on several."""


bench.add_command(comm)
bench.add_command(data)


@bench.command()
@click.option(
    "-n",
    "--workers",
    metavar="N[,N…]",
    help="Number of workers, or several for a scaling study, such as 1,2,4,8. [all slots of the "
    "hosts; on this host one per GPU, or 1]",
)
@click.option(
    "--per-gpu",
    type=click.IntRange(min=1),
    metavar="K",
    help="Number of workers that share each GPU of this host, under MPS.",
)
@host_options
@click.option(
    "--model",
    "models",
    default=("resnet50",),
    show_default=True,
    multiple=True,
    metavar="NAME",
    help="Model to train, by its name in farandole.models. Repeat it to compare several.",
)
@click.option(
    "--batch-size",
    type=int,
    default=32,
    show_default=True,
    help="Images per worker in each step.",
)
@click.option(
    "--image-size",
    type=int,
    help="Height and width of the images, in pixels. [the model's own]",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Arithmetic. tf32 needs an NVIDIA GPU (Ampere or later). bf16 uses PyTorch's autocast.",
)
@click.option(
    "--channels-last",
    is_flag=True,
    help="Use the channels-last memory format for model and images.",
)
@click.option("--compile", is_flag=True, help="Compile the model with torch.compile.")
@click.option(
    "--cuda-graphs",
    is_flag=True,
    help="With --compile: capture the model as CUDA graphs, which the host launches as one.",
)
@click.option("--fused", is_flag=True, help="Take the optimizer's step in one kernel.")
@sync_option(multiple=True)
@click.option(
    "--scaling",
    type=click.Choice(["weak", "strong", "both"]),
    default="weak",
    show_default=True,
    help="With several numbers of workers. weak: each worker keeps its batch. strong: all together "
    "keep the batch of the smallest number of workers.",
)
@click.option(
    "--epoch-images",
    type=int,
    default=50_000,
    show_default=True,
    help="Images of an epoch, for the time per epoch of a scaling study.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the scaling study: a .png or .svg file.",
)
@click.option(
    "--warmup-batches",
    type=int,
    default=10,
    show_default=True,
    help="Batches to train before timing starts.",
)
@click.option(
    "--batches-per-iteration",
    type=int,
    default=10,
    show_default=True,
    help="Batches in each timed iteration.",
)
@click.option(
    "--iterations", type=int, default=10, show_default=True, help="Number of timed iterations."
)
@click.option("--bare", is_flag=True, help="Also time a plain PyTorch loop, and print the ratio.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the settings and all figures to FILE.",
)
def train(
    workers: str | None,
    per_gpu: int | None,
    where: HostOptions,
    models: tuple[str, ...],
    sync: tuple[str, ...],
    scaling: str,
    epoch_images: int,
    plot_path: Path | None,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Train on random images and print images per second.

    The command trains some warm-up batches, then times iterations of several batches each. The
    result is the mean of the iterations, ± 1.96 standard deviations.

    With several numbers of workers, models or strategies, or with --plot, it is a scaling study: a
    table of images per second, time per epoch and efficiency, and a picture of all of them.

    \b
      farandole bench train -n 2 --model resnet18 --image-size 64
      farandole bench train -H node1:4,node2:4 --sync daso
      farandole bench train --per-gpu 4 --batch-size 16 --precision bf16 --channels-last
      farandole bench train --model resnet50 --batch-size 256 --precision bf16 \\
        --channels-last --compile --bare --json resnet50.json
      farandole bench train -n 1,2,4,8 --model resnet18 --sync allreduce --sync local:every=8 \\
        --scaling both --plot scaling.svg
    """
    from farandole.bench.scaling.plan import read_counts

    counts = None if workers is None else read_counts(workers)
    is_study = plot_path is not None or any(
        len(given) > 1 for given in (counts or (), models, sync)
    )
    if is_study and per_gpu is not None:
        raise UserError(
            f"--per-gpu {per_gpu} is for one measurement, and this is a study. Measure each number "
            "of workers by itself."
        )
    if is_study:
        paths = (json_path, plot_path)
        _study(counts, where, models, sync, scaling, epoch_images, paths, options)
        return

    import torch

    from farandole.bench.throughput import Workload
    from farandole.launch.job import Job
    from farandole.options import format_options
    from farandole.sync import parse

    asked = counts[0] if counts else None
    sharing = None if per_gpu is None else _sharing(per_gpu, where, asked)
    placement = None if sharing else place(where, asked)
    if sharing is not None:
        count = sharing.workers
    else:
        count = placement.topology.size if placement else asked or torch.cuda.device_count() or 1
    strategy = parse(sync[0]) if sync else None
    workload = Workload(model=models[0], **options)
    workload.rehearse()
    _check_machine(workload)
    output = check_output("--json", json_path) if json_path else None
    chosen = {
        environment.SCRIPT: "bench train",
        environment.SYNC: str(strategy) if strategy else "",
    }
    command = ["-m", "farandole.bench.throughput", format_options(workload)]
    job = Job(
        workers=count,
        command=[*command, str(output)] if output else command,
        environment=chosen,
        rank0_owns_terminal=True,  # only rank 0 prints, so its lines need no prefix
    )
    outputs = [f"--json {json_path}"] if output else []
    run_placed(job, placement, *outputs, sharing=sharing)


def _sharing(per_gpu: int, where: HostOptions, workers: int | None) -> GpuSharing:
    """The GPUs of this host, which is the only one. Raises `UserError`."""
    from farandole.launch.gpu.sharing import plan_sharing

    refuse_hosts(f"--per-gpu {per_gpu}", where)
    refuse_allocation(f"--per-gpu {per_gpu}", where)
    return plan_sharing(per_gpu, workers=workers)


def _study(
    counts: tuple[int, ...] | None,
    where: HostOptions,
    models: tuple[str, ...],
    sync: tuple[str, ...],
    scaling: str,
    epoch_images: int,
    paths: tuple[Path | None, Path | None],
    options: dict[str, Any],
) -> None:
    """Refuses bad input before the first worker starts."""
    import torch

    from farandole.bench.scaling.command import measure_scaling
    from farandole.bench.scaling.plan import BOTH, plan_cells
    from farandole.bench.throughput import Workload
    from farandole.report.plots.render import picture_kind
    from farandole.sync import AllReduce, parse

    if options["bare"]:
        raise UserError("--bare compares one run with a plain loop; leave it out of a study.")
    workload = Workload(model=models[0], **options)
    if counts is None:
        placement = place(where, None)
        counts = (placement.topology.size if placement else torch.cuda.device_count() or 1,)
    syncs = [str(parse(text)) for text in sync] or [str(AllReduce())]
    scalings = BOTH if scaling == "both" else tuple(name for name in BOTH if name == scaling)
    cells = plan_cells(models, syncs, scalings, counts, workload.batch_size)
    for model, size in dict.fromkeys((cell.curve.model, cell.batch_size) for cell in cells):
        replace(workload, model=model, batch_size=size).rehearse()
    _check_machine(workload)
    json_path, plot_path = paths
    if plot_path is not None:
        picture_kind(plot_path, "a scaling study")
    json_file = check_output("--json", json_path) if json_path else None
    plot_file = check_output("--plot", plot_path) if plot_path else None
    measure_scaling(cells, workload, epoch_images, where, json_file, plot_file)


def _check_machine(workload: Workload) -> None:
    """Raises `UserError` where this machine lacks what was asked for."""
    if workload.precision == "tf32":
        _check_tf32()
    if workload.compile:
        _check_compile()
    if workload.cuda_graphs:
        _check_cuda_graphs()


def _check_tf32() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise UserError(
            "--precision tf32 is a mode of NVIDIA GPUs and there is none here. Use fp32 or bf16."
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise UserError(
            f"--precision tf32 needs a GPU of compute capability 8.0 (Ampere) or later; "
            f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}. Use fp32."
        )


def _check_cuda_graphs() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise UserError("--cuda-graphs is for NVIDIA GPUs, and there is none here. Leave it out.")


def _check_compile() -> None:
    import torch

    from farandole.doctor.checks import check_compiler

    found = check_compiler(gpu=torch.cuda.device_count() > 0)
    if found.status != "ok":
        raise UserError(
            f"--compile needs a compiler that torch.compile can call: {found.value}. "
            f"Try: {found.hint}, or leave --compile out."
        )

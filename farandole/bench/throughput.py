"""Synthetic training throughput: what each worker of `farandole bench train` runs.

Random images stay on the device, so that nothing but training is timed. Warm-up first, then
iterations of some batches each; the clock is read, and anything printed or exchanged, only between
iterations. As a module it runs under any launcher that `fd.init` knows:

    mpirun -n 4 python -m farandole.bench.throughput model=resnet18,batch_size=64 out.json
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from farandole.errors import FarandoleError, UserError
from farandole.files import write_whole
from farandole.models import build, spec
from farandole.options import parse_options
from farandole.sync import AllReduce
from farandole.system.memory import peak_process_bytes
from farandole.train.run import Run
from farandole.train.run_metrics import versions
from farandole.train.start import init
from farandole.worker.gpu_memory import gather_bytes, peak_bytes
from farandole.worker.out_of_memory import fewer_option, is_out_of_memory, workers_per_gpu

_RATE, _MOMENTUM = 0.01, 0.9
_EXTRAS = ("channels_last", "compile", "cuda_graphs", "fused")
_TIMEOUT_SECONDS = 1800.0  # ranks that compile may be minutes apart; a dead one is noticed at once


@dataclass(frozen=True)
class Workload:
    """What is timed. Its text form (`farandole.options`) is the argument of this module."""

    model: str = "resnet50"
    batch_size: int = 32  # per worker
    image_size: int | None = None  # None: the model's own
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False  # of what is compiled
    fused: bool = False  # the optimizer's step as one kernel
    warmup_batches: int = 10
    batches_per_iteration: int = 10
    iterations: int = 10
    bare: bool = False  # alternate with a plain PyTorch loop, and compare
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        spec(self.model)  # an unknown name is an error here, not on every worker
        least = {"batch_size": 1, "batches_per_iteration": 1, "iterations": 1, "warmup_batches": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                option = name.replace("_", "-")
                raise UserError(f"--{option} {getattr(self, name)}: give {smallest} or more.")
        if self.cuda_graphs and not self.compile:
            raise UserError("--cuda-graphs captures what torch.compile makes: add --compile.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        native = spec(self.model)
        side = native.image_size if self.image_size is None else self.image_size
        return native.channels, side, side

    def network(self) -> nn.Module:
        model = build(self.model, image_size=self.image_shape[-1])
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batch(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(self.batch_size, *self.image_shape, device=device)
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        model = spec(self.model)
        shape = (self.batch_size, *(self.image_shape[1:] if model.pixels else ()))
        labels = torch.randint(model.classes, shape, device=device)
        return images, labels

    def rehearse(self) -> None:
        """Runs the shapes through the model without memory or arithmetic.

        Raises `UserError` when the images are too small for the model, or the batch for its
        BatchNorm: better here than in every worker.
        """
        with torch.device("meta"):
            model = self.network()
            images, labels = self.batch("meta")
        try:
            F.cross_entropy(model(images), labels)
        except (RuntimeError, ValueError) as error:
            size = "×".join(map(str, self.image_shape))
            raise UserError(
                f"{self.model} cannot train on batches of {self.batch_size} images of {size}: "
                f"{error}. Give a larger --batch-size or --image-size."
            ) from error


class Bench:
    """The loop that is timed, for one model at a time, on one device."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.images, self.labels = workload.batch(device)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> None:
        """Nothing here waits for the device or for Python more than a bare loop does."""
        images, labels, autocast = self.images, self.labels, self._autocast()
        for _ in range(batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

    def rate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """Images per second of one iteration on this rank."""
        batches = self.workload.batches_per_iteration
        self.finish()
        begin = time.perf_counter()
        self.train(model, optimizer, batches)
        self.finish()
        return batches * self.workload.batch_size / (time.perf_counter() - begin)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.workload.network().to(self.device)
        fused = self.workload.fused or None  # None: as torch itself decides
        optimizer = torch.optim.SGD(model.parameters(), _RATE, _MOMENTUM, fused=fused)
        if self.workload.compile:
            mode = "reduce-overhead" if self.workload.cuda_graphs else None
            # Wrapped: by `model.compile()` Dynamo does not look into an nn.Sequential.
            model = torch.compile(model, mode=mode)  # type: ignore[assignment]
        return model, optimizer

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.workload.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


def measure(run: Run, workload: Workload) -> dict[str, Any]:
    """*Together.* Trains, prints on rank 0 as it goes, returns all figures."""
    _set_precision(workload.precision)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    sync = run.settings.sync or AllReduce()
    bench = Bench(workload, run.device)
    name = device_name(run.device)
    say = _do_nothing if workload.quiet else run.print
    if not workload.quiet:
        _print_header(run, workload, str(sync), name)

    sides = {"run": run.distribute(*bench.fresh(), sync=sync)}
    if workload.bare:
        sides["bare"] = bench.fresh()
    first = ", in which torch.compile compiles the model; that may take minutes" * workload.compile
    say(f"Running warm-up{first}…")
    for model, optimizer in sides.values():
        bench.train(model, optimizer, workload.warmup_batches)
    bench.finish()

    say("Running benchmark…")
    meter = run.group.meter
    rates: dict[str, list[float]] = {side: [] for side in sides}
    waited_seconds, bytes_sent = 0.0, 0
    for index in range(workload.iterations):
        run.group.barrier()
        # Each side goes first every other time, so that a machine that speeds up or slows down
        # favours neither.
        for side in list(sides)[:: 1 if index % 2 == 0 else -1]:
            before = meter.waited_seconds, meter.bytes_sent
            rate = bench.rate(*sides[side])
            if side == "run":
                waited_seconds += meter.waited_seconds - before[0]
                bytes_sent += meter.bytes_sent - before[1]
            rates[side].append(run.mean(rate))
        bare = f" (bare {rates['bare'][-1]:.1f})" if workload.bare else ""
        say(f"Iter #{index}: {rates['run'][-1]:.1f} img/sec per worker{bare}")

    peaks = gather_bytes(run.group, _peak_memory(run.device))
    per_worker = _figures(rates["run"])
    result: dict[str, Any] = {
        "settings": {**asdict(workload), "image_size": workload.image_shape[-1], "sync": str(sync)},
        "workers": run.size,
        "device": name,
        "images_per_second_per_worker": per_worker,
        "images_per_second_total": {key: per_worker[key] * run.size for key in ("mean", "ci")},
        "waited_seconds": run.mean(waited_seconds),
        "bytes_sent_per_worker": run.mean(float(bytes_sent)),
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_by_rank": peaks,
        "versions": {**versions(), "cuda": torch.version.cuda},
    }
    if workload.bare:
        result["bare_images_per_second_per_worker"] = _figures(rates["bare"])
        pairs = zip(rates["run"], rates["bare"], strict=True)
        result["ratio_to_bare"] = statistics.median(ours / bare for ours, bare in pairs)
    if not workload.quiet:
        _print_summary(run, result)
    return result


def _do_nothing(text: str) -> None: ...


def _figures(rates: Sequence[float]) -> dict[str, Any]:
    """The margin is 1.96 standard deviations of the iterations, as Horovod's benchmark gives it."""
    margin = 1.96 * statistics.pstdev(rates)
    return {"mean": statistics.fmean(rates), "ci": margin, "iterations": list(rates)}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU ({platform.machine()}, {capability}, threads: {torch.get_num_threads()})"


def _set_precision(precision: str) -> None:
    """Makes fp32 mean fp32: cuDNN's convolutions use TF32 unless told otherwise.

    The matrix products are set by the function that keeps PyTorch's old and new settings the same:
    Inductor reads either, and PyTorch refuses to answer when only the new one was set.
    """
    if precision == "bf16":
        return
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"  # type: ignore[attr-defined]
    if precision == "fp32":
        # The compiler advises TF32; whoever asks for fp32 has decided.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")


def _peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU what tensors took, else the whole process."""
    peak = peak_bytes(device)
    return peak_process_bytes() if peak is None else peak


def _print_header(run: Run, workload: Workload, sync: str, device: str) -> None:
    extras = [word for word in _EXTRAS if getattr(workload, word)]
    run.print(f"Model: {workload.model}, images {'×'.join(map(str, workload.image_shape))}")
    run.print(f"Batch size: {workload.batch_size} per worker")
    run.print(f"Workers: {run.size}, {sync}")
    run.print(f"Device: {device}, {', '.join([workload.precision, *extras])}")


def _print_summary(run: Run, result: dict[str, Any]) -> None:
    worker = result["images_per_second_per_worker"]
    total = result["images_per_second_total"]
    timed = result["settings"]["batches_per_iteration"] * result["settings"]["batch_size"]
    timed_seconds = sum(timed / rate for rate in worker["iterations"])
    waited = result["waited_seconds"]
    run.print(
        f"Waiting for communication: {waited:.3f} s of {timed_seconds:.3f} s "
        f"({waited / timed_seconds:.1%})"
    )
    run.print(f"Peak memory per worker: {result['peak_memory_bytes'] / 2**20:,.0f} MiB")
    run.print(f"Img/sec per worker: {worker['mean']:.1f} ± {worker['ci']:.1f}")
    run.print(f"Total img/sec on {run.size} worker(s): {total['mean']:.1f} ± {total['ci']:.1f}")
    if "ratio_to_bare" in result:
        run.print(f"Ratio to a bare PyTorch loop: {result['ratio_to_bare']:.4f}")


def main(arguments: Sequence[str]) -> None:
    workload = parse_options(Workload, arguments[0] if arguments else "", what="the workload")
    run = init(timeout=_TIMEOUT_SECONDS)
    try:
        result = measure(run, workload)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        per_gpu = workers_per_gpu()
        fewer = f", or fewer workers a GPU: {fewer_option(per_gpu)}" if per_gpu > 1 else ""
        raise FarandoleError(
            f"out of memory: {workload.model} with {workload.batch_size} images per worker does "
            f"not fit {device_name(run.device)}. Give a smaller --batch-size{fewer}."
        ) from error
    if run.rank == 0 and len(arguments) > 1:
        path = Path(arguments[1])
        try:
            write_whole(path, json.dumps(result, indent=2).encode() + b"\n")
        except FarandoleError as error:
            raise FarandoleError(
                f"{path} could not be written ({error.__cause__}). What was measured stands above."
            ) from error


if __name__ == "__main__":
    main(sys.argv[1:])

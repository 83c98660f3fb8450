"""Step time of ResNet-50 on one GPU: batches of `fd.data.shards` against a batch that lies there.

JPEG images in tars, and arrays in safetensors files, are read from the file cache by loading
processes, pinned, and copied on a side stream, as `run.loader` does by itself. Both sides train the
same model in the same loop. Both get uint8 images and normalise them on the GPU, so the input is
all that differs. Target: at most 1.03, where the input alone has at least 1.1 times the samples per
second of the model alone. Otherwise the row says which of the two limits.

The sides take turns within one pass over the data, which are repeated so that it is long enough: no
loading process starts while the clock runs.

    synthetic │ the queue fills, not timed │ timed │
    real                                            │ the queue is emptied, not trained │ timed │

What was loaded during the turn of the synthetic side would hide a slow input, and loading during
that turn would slow that side: hence the parts that are not timed. A block's time counts all of its
steps, so one long wait counts as well. The labels of every batch are compared with the order that
the loader announced, and some images of every block with the pictures that were written.

    python benchmarks/data_gpu.py                        on a GPU; less than 3 minutes
    python benchmarks/data_gpu.py --compiled --batches 256 --seconds 240
    python benchmarks/data_gpu.py --device cpu --tiny    tries the logic, and keeps no result
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from common import save, spread
from gpu.input_sides import CheckedInput, Training
from gpu.pictures import (
    FULL,
    TINY,
    Scale,
    of_array,
    of_jpeg,
    write_arrays,
    write_jpegs,
)
from torch import Tensor

import farandole as fd
from farandole.bench.data import InputFigures, lines

TARGET, KEEPS_UP = 1.03, 1.1
KINDS = ("jpeg", "array")
PREFETCH = 2  # batches that each loading process has ready: the library's default
WARM_STEPS, LEAST_ROUNDS = 4, 2
MOST_REFILL_SECONDS = 3.0


class Comparison:
    """One kind of data, one size of batch."""

    def __init__(
        self, run: fd.Run, training: Training, scale: Scale, kind: str, processes: int
    ) -> None:
        self._run, self._training, self._scale = run, training, scale
        self._kind, self._processes = kind, processes
        self._ahead = processes * PREFETCH + 1  # batches that are loaded before they are asked for

    def measure(self, data: Any, batch: int, rounds: int, deadline: float) -> dict[str, Any]:
        training, steps = self._training, self._scale.steps(batch, self._processes)
        loader = self._run.loader(
            data, batch_size=batch, num_workers=self._processes, drop_last=True
        )
        real = CheckedInput(loader, self._kind, self._scale)
        images, labels = next(real)
        synthetic = repeat((images.clone(), labels.clone()))
        rate = self._input_alone(real, batch)
        refill = min(MOST_REFILL_SECONDS, self._ahead * batch / rate)
        found: dict[str, list[list[float]]] = {"synthetic": [], "real": []}
        waited: list[float] = []
        for turn in range(rounds + 1):
            for side in ("synthetic", "real") if turn % 2 else ("real", "synthetic"):
                if side == "synthetic":
                    self._let_fill(synthetic, refill)
                    seconds = training.timed(synthetic, steps)
                else:
                    self._empty(real)
                    training.timed(real, WARM_STEPS)
                    real.waited = 0.0
                    seconds = training.timed(real, steps)
                    waited.append(real.waited / steps)
                if turn:  # the first of each side warms up
                    found[side].append(seconds)
            real.check()
            if turn >= LEAST_ROUNDS and time.monotonic() > deadline:
                break
        real.close()
        row = {"kind": self._kind, "batch": batch, "steps_in_block": steps, **_times(found)}
        row["waited_ms"] = spread([1000 * each for each in waited[1:]])
        row["samples_checked"] = real.checked
        row["samples_trained_on"] = batch * steps * len(found["real"])
        return {**row, **self._verdict(rate, batch, loader.pin_memory, row)}

    def _input_alone(self, real: CheckedInput, batch: int) -> float:
        """Samples per second, up to the device's memory, while nothing is computed."""
        self._empty(real)
        count = input_batches(self._scale, batch, self._processes)
        began = time.perf_counter()
        for _ in range(count):
            next(real)
        self._training.settle()
        return count * batch / (time.perf_counter() - began)

    def _empty(self, real: CheckedInput) -> None:
        for _ in range(self._ahead):
            next(real)

    def _let_fill(self, synthetic: Iterator[tuple[Tensor, Tensor]], seconds: float) -> None:
        until = time.monotonic() + seconds
        self._training.timed(synthetic, WARM_STEPS)
        while time.monotonic() < until:
            self._training.timed(synthetic, 1)

    def _verdict(self, rate: float, batch: int, pinned: bool, row: dict[str, Any]) -> Any:
        model, both = (1000 * batch / row["step_ms"][s]["median"] for s in ("synthetic", "real"))
        figures = InputFigures(
            both=both,
            model=model,
            input=rate,
            ranks=1,
            global_batch=batch,
            num_workers=self._processes,
            pin_memory=pinned,
            cores=len(os.sched_getaffinity(0)),
            device=str(self._training.device),
            chunked=True,
        )
        keeps_up = rate >= KEEPS_UP * model
        return {
            "samples_per_second": {"input_alone": rate, "model_alone": model, "both": both},
            "input_keeps_up": keeps_up,
            "target_met": row["ratio"] <= TARGET if keeps_up else None,
            "limits": [line for line in lines(figures) if line.startswith(("The ", "- "))],
        }


def _times(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """`ratio` is that of whole blocks; medians of single steps do not show a rare long wait."""
    means = {s: [statistics.mean(block) for block in blocks] for s, blocks in found.items()}
    medians = {s: [statistics.median(block) for block in blocks] for s, blocks in found.items()}

    def ratios(of: dict[str, list[float]]) -> list[float]:
        return [real / lying for real, lying in zip(of["real"], of["synthetic"], strict=True)]

    return {
        "step_ms": {s: spread([1000 * each for each in means[s]]) for s in means},
        "ratio": statistics.median(ratios(means)),
        "ratios": [round(each, 4) for each in ratios(means)],
        "ratio_of_median_steps": statistics.median(ratios(medians)),
    }


def input_batches(scale: Scale, batch: int, processes: int) -> int:
    """That the input alone is timed with."""
    return max(2 * scale.block // batch, 4 * processes)


def repeats(scale: Scale, batches: Sequence[int], processes: int, rounds: int) -> int:
    """How often the data are listed, so that no comparison comes to the end of them."""
    ahead = processes * PREFETCH + 1

    def taken(batch: int) -> int:
        block = ahead + WARM_STEPS + scale.steps(batch, processes)
        alone = input_batches(scale, batch, processes)
        return batch * (1 + ahead + alone + (rounds + 1) * block + 2 * ahead)

    return -(-max(map(taken, batches)) // scale.samples)


def require_shared_memory(scale: Scale, batches: Sequence[int], processes: int) -> None:
    """Loading processes hand over their batches in it. Where it is full, they are killed."""
    needed = (processes * PREFETCH + 2) * max(batches) * 3 * scale.side**2
    free = shutil.disk_usage("/dev/shm").free
    if free < needed:
        raise SystemExit(
            f"/dev/shm has {free >> 20} MiB free, and batches under way take {needed >> 20} MiB: "
            "give fewer --processes, or smaller --batches."
        )


def show(row: dict[str, Any]) -> None:
    rates = row["samples_per_second"]
    met = {True: "met", False: "missed", None: "the target does not apply"}[row["target_met"]]
    print(
        f"{row['kind']:6} batch {row['batch']:4}: input alone {rates['input_alone']:8.0f}, model "
        f"alone {rates['model_alone']:8.0f} samples/s; step {row['ratio']:.3f} of synthetic ({met})"
    )
    for line in row["limits"]:
        print(f"    {line}", flush=True)


def measured(asked: argparse.Namespace, scale: Scale, place: Path) -> dict[str, Any]:
    end = time.monotonic() + asked.seconds
    patterns = {}
    with ProcessPoolExecutor(asked.processes) as pool:
        for kind in asked.kinds:
            write = write_jpegs if kind == "jpeg" else write_arrays
            patterns[kind] = write(place / kind, scale, pool)
    transforms = {"jpeg": partial(of_jpeg, scale.side), "array": of_array}
    listed = repeats(scale, asked.batches, asked.processes, asked.rounds)
    rows: list[dict[str, Any]] = []
    left = [(kind, batch) for kind in asked.kinds for batch in asked.batches]
    with fd.init(folder=place / "runs") as run:
        training = Training(run, scale, compiled=asked.compiled)
        data = {
            kind: fd.data.shards([pattern] * listed, transform=transforms[kind])
            for kind, pattern in patterns.items()
        }
        while left and time.monotonic() < end:
            deadline = time.monotonic() + (end - time.monotonic()) / len(left)
            kind, batch = left.pop(0)
            comparison = Comparison(run, training, scale, kind, asked.processes)
            rows.append(comparison.measure(data[kind], batch, asked.rounds, deadline))
            show(rows[-1])
    for kind, batch in left:
        print(f"{kind:6} batch {batch:4}: not measured within --seconds {asked.seconds:g}")
    sizes = {kind: sum(map(_size, (place / kind).rglob("*.*"))) for kind in asked.kinds}
    return {
        "bytes_per_sample": {kind: size // scale.samples for kind, size in sizes.items()},
        "rows": rows,
        "not_measured": [list(each) for each in left],
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, small images, few")
    parser.add_argument("--compiled", action="store_true", help="each size of batch anew: slow")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--processes", type=int, help="that load [the cores, less two]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=160.0, help="of which rows get a share")
    parser.add_argument("--folder", type=Path, help="for the data, while it runs")
    parser.add_argument("--save", metavar="NAME", help="of the result [data_gpu; not with --tiny]")
    asked = parser.parse_args()
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run takes a GPU where it sees one
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: --device cpu --tiny tries the logic.")
    scale = TINY if asked.tiny else FULL
    asked.batches = asked.batches or scale.batches
    asked.processes = asked.processes or max(1, len(os.sched_getaffinity(0)) - 2)
    require_shared_memory(scale, asked.batches, asked.processes)
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        found = measured(asked, scale, Path(place))
    result = {
        "what": "seconds of a training step, batches of run.loader over a batch on the device",
        "model": scale.model,
        "compiled": asked.compiled,
        "precision": "bf16 autocast, channels-last" if asked.device == "cuda" else "float32",
        "image_side": scale.side,
        "normalised": "on the device, on both sides",
        "samples": scale.samples,
        "files": "in the file cache",
        "loading_processes": asked.processes,
        "target": TARGET,
        "keeps_up_from": KEEPS_UP,
        **found,
    }
    if asked.save or not asked.tiny:
        save(asked.save or "data_gpu", result)


if __name__ == "__main__":
    main()

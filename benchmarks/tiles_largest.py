"""The largest square image that trains on one device: the plain model, and tiles visited in turn.

A size trains when a step of one image (forward, backward, update) ends. Modes:

    plain              the model as it is
    recompute          activations are computed again, block by block
    recompute+offload  and what is kept of each block waits in the host's memory
    in_turn            and each block computes one tile after the other

`in_turn:3` and so on have three blocks at a time instead of one: less is kept, and more is needed
while they are computed again. Sizes go upwards, modes take turns at each; one that fails is out.
Every attempt is a process of its own, so that a failure spoils nothing else. It is ended when it
takes too long, or when the host has less memory left than a margin.

    python benchmarks/tiles_largest.py --models resnet110_v2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from tiled import Side

import farandole as fd
from farandole.worker.signals import signals_noted

MODELS = ("resnet110_v2", "amoebanet_d")
MODES = ("plain", "recompute", "recompute+offload", "in_turn")
SIZES = (1024, 2048, 4096, 8192, 12288, 16384)
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
RESULT_FILE = "BENCHMARK_RESULT_FILE"
"""Where an attempt writes what it found. Set for attempts only, so it tells them from the rest."""
_POLL_SECONDS = 0.1
_LOG_TAIL = 600
_GIB = 2**30


def layout_of(mode: str, size: int, tile: int) -> str | None:
    """As text; None: none."""
    name, _, blocks = mode.partition(":")
    recompute = f"recompute,recompute_blocks={blocks or 1}"
    side = max(2, math.ceil(size / tile))
    return {
        "plain": None,
        "recompute": recompute,
        "recompute+offload": f"{recompute},offload",
        "in_turn": f"tiles={side}x{side},in_turn,{recompute},offload",
    }[name]


# One attempt, in a process of its own


def attempt(args: argparse.Namespace, file: Path) -> None:
    """Of the first model, mode and size of the arguments. Writes what came of it."""
    (model,), (mode,), (size,) = args.models, args.modes, args.sizes
    row: dict[str, Any] = {"losses": [], "step_seconds": []}
    world = fd.init(folder=file.parent)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        layout = layout_of(mode, size, args.tile)
        precision = PRECISIONS[args.precision]
        side = Side(world, model, layout, size, 1, precision=precision)
        for _ in range(args.steps):
            begin = time.perf_counter()
            row["losses"].append(side.step())
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            row["step_seconds"].append(time.perf_counter() - begin)
    except (RuntimeError, MemoryError, fd.FarandoleError) as error:
        row["failure"] = reason(error)
    if world.device.type == "cuda":
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        row["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
    file.write_text(json.dumps(row))


def reason(error: BaseException) -> str:
    """In one line; what a stage says has its cause behind it."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
        return "out of GPU memory"
    if any(isinstance(cause, MemoryError) or "allocate memory" in str(cause) for cause in causes):
        return "out of host memory"
    return f"{type(causes[-1]).__name__}: {' '.join(str(causes[-1]).split())[:300]}"


# The controller, which has nothing on the GPU


def attempted(args: argparse.Namespace, model: str, mode: str, size: int) -> dict[str, Any]:
    """The row of an attempt, whether it trained or not."""
    row: dict[str, Any] = {
        "model": model,
        "mode": mode,
        "size": size,
        "layout": layout_of(mode, size, args.tile) or "none",
    }
    command = [sys.executable, __file__, "--models", model, "--modes", mode]
    command += ["--sizes", str(size), "--tile", str(args.tile)]
    command += ["--precision", args.precision, "--steps", str(args.steps)]
    limit = min(args.timeout, args.ends_at - time.monotonic())
    with tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as folder:
        file, log = Path(folder) / "row.json", Path(folder) / "log"
        environment = {**os.environ, RESULT_FILE: str(file)}
        # Large blocks of different sizes: without this much of the memory would be holes.
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            ended, row["host_peak_bytes"] = watched(process, limit, args.margin_gib * _GIB)
        if ended is not None:
            row["failure"] = ended
        elif file.exists():
            row |= json.loads(file.read_text())
        else:
            said = log.read_text()[-_LOG_TAIL:]
            row["failure"] = f"ended with exit code {process.returncode}: {said}"
    return row


def watched(
    process: subprocess.Popen[bytes], seconds: float, margin: float
) -> tuple[str | None, int]:
    """Why it had to be ended, or None; and the most memory of the host that it had."""
    begin, peak = time.monotonic(), 0
    with signals_noted() as received:
        try:
            while process.poll() is None:
                if received:
                    sys.exit(f"stopped by {received[0]}")
                peak = max(peak, _kib(Path(f"/proc/{process.pid}/status"), "VmHWM"))
                if available() < margin:
                    return f"out of host memory: less than {margin / _GIB:g} GiB were left", peak
                if time.monotonic() - begin > seconds:
                    return f"took more than {seconds:.0f} s", peak
                time.sleep(_POLL_SECONDS)
            return None, peak
        finally:
            process.kill()
            process.wait()


def available() -> int:
    """Bytes that the host, or the container that this is in, still has."""
    host = _kib(Path("/proc/meminfo"), "MemAvailable")
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # there is none, or it says "max"
        return host
    files = sum(int(line.split()[1]) for line in kept if line.startswith("inactive_file "))
    return min(host, limit - used + files)


def _kib(file: Path, field: str) -> int:
    """The bytes of a line that counts KiB; 0 when it is not there (any more)."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(found[0].split()[1]) if found else 0


def search(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    modes = list(args.modes)
    for size in args.sizes:
        for mode in list(modes):
            if time.monotonic() > args.ends_at:
                print(f"{model}, {mode}, {size}²: not tried, --budget is spent", flush=True)
                continue
            row = attempted(args, model, mode, size)
            rows.append(row)
            show(row)
            if "failure" in row:
                modes.remove(mode)
    return rows


def largest(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found.setdefault(row["mode"], 0)
        if "failure" not in row:
            found[row["mode"]] = max(found[row["mode"]], row["size"])
    return found


def differences(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By mode and size: the losses' largest, relative to those of the plain model."""
    trained = {(row["mode"], row["size"]): row["losses"] for row in rows if "failure" not in row}
    found: dict[str, dict[str, float]] = {}
    for (mode, size), losses in trained.items():
        plain = trained.get(("plain", size))
        if mode != "plain" and plain is not None:
            each = [abs(one / other - 1) for one, other in zip(losses, plain, strict=True)]
            found.setdefault(mode, {})[str(size)] = max(each)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="see benchmarks/tiled.py")
    parser.add_argument(
        "--modes", nargs="+", default=MODES, help="such as plain, in_turn, in_turn:3"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="pixels a side")
    parser.add_argument("--tile", type=int, default=2048, help="the largest, pixels a side")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--steps", type=int, default=2, help="the first one has more to do")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds, of an attempt")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, of all of them")
    parser.add_argument(
        "--margin-gib", type=float, default=4.0, help="that the host must have left"
    )
    parser.add_argument(
        "--save", default="tiles_largest", metavar="NAME", help="of the result file"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")
    args = parser.parse_args()
    for mode in args.modes:
        if mode.partition(":")[0] not in MODES:
            parser.error(f"--modes {mode}: there are {', '.join(MODES)}, and :N blocks at a time")
    if RESULT_FILE in os.environ:
        attempt(args, Path(os.environ[RESULT_FILE]))
        return
    args.ends_at = time.monotonic() + args.budget
    args.sizes = sorted(args.sizes)
    found = {model: search(args, model) for model in args.models}
    result = {
        "precision": args.precision,
        "steps": args.steps,
        "models": {
            model: {
                "largest": largest(rows),
                "loss_differences_from_plain": differences(rows),
                "attempts": rows,
            }
            for model, rows in found.items()
        },
    }
    save(args.save, result, args.out)
    for model, rows in found.items():
        told = ", ".join(f"{mode} {size}²" for mode, size in largest(rows).items())
        print(f"the largest image that trains, {model}: {told}")
        for mode, sizes in differences(rows).items():
            size = max(sizes, key=int)
            print(f"loss of {mode} at {size}²: {sizes[size]:.2e} from the plain model's")


def show(row: dict[str, Any]) -> None:
    if "failure" in row:
        outcome = row["failure"]
    else:
        outcome = f"{row['step_seconds'][-1]:.2f} s a step, loss {row['losses'][0]:.5f}"
    peaks = [
        f"{row[key] / _GIB:.1f} GiB {where}"
        for key, where in (("gpu_peak_bytes", "of the GPU"), ("host_peak_bytes", "of the host"))
        if row.get(key)
    ]
    told = f"{row['model']}, {row['mode']} ({row['layout']}), {row['size']}²: {outcome}"
    print(f"{told}; {', '.join(peaks)}", flush=True)


if __name__ == "__main__":
    main()

"""How much memory does a rank need when the image is cut into 1, 2, 4 or 9 tiles?

Every number of tiles is a world of its own, of as many real processes with one thread each; one
tile is the plain model in one process. Three figures of the rank that needs most:

    activations   what autograd keeps for the backward pass, in bytes
    for images    the process's peak in a step, above what it has after steps of small images
    in all        the same, above what it had before its first step

Each is compared with the plain model's share: its figure divided by the tiles. 1 would be ideal.
Halos come on top, and in the last figure what does not depend on the image: gradients, buffers of
the transport, code. Neighbours exchange for every layer; wider halos would take more.

    python benchmarks/tiles_memory.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from tiled import Side, batch

import farandole as fd
from farandole.layout.pipeline.memory import ActivationMeter, storages_of
from farandole.train.engines.pipelined import PipelinedEngine

MODELS = ("resnet110_v2:units=2", "amoebanet_d:layers=3,filters=64", "unet:width=8,depth=3")
TILES = ("1x1", "2x1", "2x2", "3x3")
FIGURES = ("activation", "image", "resident")
STEPS_BEFORE = 2
"""Of small images. In these layers are timed, which takes more memory."""
SMALL = 96
"""Pixels a side, or a quarter of the large ones: enough for every tile to have some at the end."""
TIMEOUT_SECONDS = 600.0
RESULT_FILE = "BENCHMARK_RESULT_FILE"
"""Where rank 0 writes what it found. Set for ranks only, so it tells them from the controller."""
_MIB = 2**20


def count(tiles: str) -> int:
    rows, columns = tiles.split("x")
    return int(rows) * int(columns)


def take_part(args: argparse.Namespace, file: Path) -> None:
    """One rank of one world: its model and its tiles are the first ones of the arguments."""
    (model,), (tiles,) = args.models, args.tiles
    world = fd.init(timeout=TIMEOUT_SECONDS, folder=file.parent)
    torch.set_num_threads(1)
    layout = None if count(tiles) == 1 else f"tiles={tiles},halo=1"
    side = Side(world, model, layout, args.size, args.batch)
    before = resident()
    small = batch(model, min(args.size, max(SMALL, args.size // 4)), args.batch)
    for _ in range(STEPS_BEFORE):
        side.trainer.step(*small)
    give_back()
    restart_peak()
    after_small = resident()
    own = {
        "activation_bytes": activations_of(side),
        "image_bytes": peak() - after_small,
        "resident_bytes": peak() - before,
        "resident_before_bytes": before,
    }
    ranks = world.group.gather_json(own)
    if world.rank == 0:
        file.write_text(json.dumps(ranks))


def activations_of(side: Side) -> int:
    """Those kept for the backward pass of one more step."""
    engine = side.trainer._engine
    if isinstance(engine, PipelinedEngine):
        meter = engine._pipelined.measure()
        side.step()
        engine._pipelined.stop_measuring()
        return meter.peak_bytes
    meter = ActivationMeter()
    weights = [*side.trainer.model.parameters(), *side.trainer.model.buffers()]
    # The backward pass keeps nothing more, so its presence changes no count.
    with meter.forward("step", [side.x], storages_of(weights)):
        side.step()
    return meter.peak_bytes


def give_back() -> None:
    """What the C library has freed goes back to the system, where there is a call for it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def restart_peak() -> None:
    """Not allowed everywhere: the peak then counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return _status("VmHWM")


def resident() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def measure(args: argparse.Namespace, model: str, tiles: str) -> dict[str, Any]:
    """A world of its own."""
    workers = count(tiles)
    script = [__file__, "--models", model, "--tiles", tiles]
    script += ["--size", str(args.size), "--batch", str(args.batch)]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as folder:
        file = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "farandole", "run", "-n", str(workers), *script]
        environment = {**os.environ, RESULT_FILE: str(file), "CUDA_VISIBLE_DEVICES": ""}
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if found.returncode:
            sys.exit(f"{model}, {tiles} tiles: {found.stdout[-2000:]}{found.stderr[-2000:]}")
        ranks: list[dict[str, int]] = json.loads(file.read_text())
    return {
        "model": model,
        "tiles": tiles,
        **{f"{name}_bytes": max(rank[f"{name}_bytes"] for rank in ranks) for name in FIGURES},
        "ranks": ranks,
        "seconds": time.perf_counter() - begin,
    }


def compared(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """With the share of the plain model's that a tile is."""
    share = 1 / count(row["tiles"])
    for name in FIGURES:
        of_plain = row[f"{name}_bytes"] / plain[f"{name}_bytes"]
        row[f"{name}_of_plain"] = of_plain
        row[f"{name}_over_share"] = of_plain / share
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="see benchmarks/tiled.py")
    parser.add_argument("--tiles", nargs="+", default=TILES, help="the first one: 1x1")
    parser.add_argument("--size", type=int, default=384, help="of the images, pixels a side")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--save", default="tiles_memory", metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")
    args = parser.parse_args()
    if RESULT_FILE in os.environ:
        take_part(args, Path(os.environ[RESULT_FILE]))
        return
    rows: list[dict[str, Any]] = []
    for model in args.models:
        plain = measure(args, model, "1x1")
        for tiles in args.tiles:
            row = plain if count(tiles) == 1 else measure(args, model, tiles)
            rows.append(compared(row, plain))
            show(row)
    save(
        args.save,
        {"size": args.size, "batch": args.batch, "rows": rows},
        args.out,
    )
    tiled = [row for row in rows if count(row["tiles"]) > 1]
    for name in FIGURES:
        over = [row[f"{name}_over_share"] for row in tiled]
        if over:
            print(f"{name} bytes over 1/tiles of the plain: {min(over):.3f} to {max(over):.3f}")


def show(row: dict[str, Any]) -> None:
    told = [
        f"{name} {row[f'{name}_bytes'] / _MIB:.1f} MiB ({row[f'{name}_over_share']:.3f} × 1/tiles)"
        for name in FIGURES
    ]
    print(f"{row['model']}, {row['tiles']}: {', '.join(told)}; {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()

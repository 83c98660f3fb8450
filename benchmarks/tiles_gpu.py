"""Tiles on the NCCL ranks of one GPU, against the plain model on the same GPU: step times, parity.

Ranks that share a GPU have its cores and its memory together, so tiles cannot be faster than one
process here. What is measured is what they cost: halos by NCCL for every group of layers, and
smaller kernels. Both sides take turns; while rank 0 trains the plain model, the others wait. The
losses of both must agree, up to how float32 rounds.

    LD_PRELOAD=…/libnccl.so.2 python benchmarks/tiles_gpu.py -n 2       # NCCL 2.30 or later
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, restart_on_workers, save, spread
from tiled import Side, batch, network, sgd

import farandole as fd

GRIDS = {2: ("2x1",), 4: ("2x2", "4x1")}
MODELS = ("convolutions:layers=12,width=64", "resnet50")
WARM_STEPS, PARITY = 4, 2e-3


class Plain:
    """One process and no library of ours."""

    def __init__(self, text: str, size: int, samples: int, device: torch.device) -> None:
        self.x, self.y = batch(text, size, samples, device)
        self.model = network(text, size).to(device)
        self.optimizer = sgd(self.model.parameters())

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def measure(run: fd.Run, text: str, grid: str, options: argparse.Namespace) -> dict[str, Any]:
    tiles = Side(run, text, f"tiles={grid}", options.size, options.batch)
    plain = Plain(text, options.size, options.batch, run.device) if run.rank == 0 else None
    losses: dict[str, list[float]] = {"tiles": [], "plain": []}
    seconds: dict[str, list[float]] = {"tiles": [], "plain": []}
    for number in range(WARM_STEPS + options.steps):
        for side in ("tiles", "plain") if number % 2 else ("plain", "tiles"):
            run.group.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            if side == "tiles":
                losses[side].append(tiles.step())
            elif plain is not None:
                losses[side].append(plain.step())
            torch.cuda.synchronize()
            run.group.barrier()
            if number >= WARM_STEPS:
                seconds[side].append(time.perf_counter() - begin)
    pairs = zip(seconds["tiles"], seconds["plain"], strict=True)
    found: dict[str, Any] = {
        "model": text,
        "tiles": grid,
        "layout": str(tiles.trainer.layout),
        "tiles_ms": {key: 1e3 * value for key, value in spread(seconds["tiles"]).items()},
        "plain_ms": {key: 1e3 * value for key, value in spread(seconds["plain"]).items()},
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "peak_memory_mib": torch.cuda.max_memory_allocated() // 2**20,
    }
    tiles.close()
    if plain is not None:
        pairs = zip(losses["tiles"], losses["plain"], strict=True)
        apart = [abs(ours - theirs) / losses["plain"][0] for ours, theirs in pairs]
        # Later ones show how training amplifies rounding: few images, learned by heart.
        found["losses"] = {side: values[:5] for side, values in losses.items()}
        found["loss_difference"] = {"first_step": apart[0], "first_three": max(apart[:3])}
        assert apart[0] < PARITY, f"{text}, {grid}: the first losses differ by {apart[0]}"
        print(f"{text}, tiles {grid}: {found['ratio']:.2f} of the plain model's step", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--workers", type=int, default=2, choices=sorted(GRIDS))
    parser.add_argument("--models", nargs="+", default=MODELS, help="see benchmarks/tiled.py")
    parser.add_argument("--size", type=int, default=1024, help="of the images, pixels a side")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", metavar="NAME", help="of the result [tiles_gpu_<workers>]")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    restart_on_workers(options.workers, per_gpu=True)
    run = fd.init(seed=0, timeout=120)
    carrier = run.group.transport.carrier(torch.empty(0, device=run.device)).name
    rows = [
        measure(run, text, grid, options)
        for text in options.models
        for grid in GRIDS[options.workers]
    ]
    if run.rank == 0:
        settings = {"size": options.size, "batch": options.batch, "steps": options.steps}
        result = {"workers": options.workers, "carried_by": carrier, **settings, "rows": rows}
        save(options.save or f"tiles_gpu_{options.workers}", result, options.out)


if __name__ == "__main__":
    main()

"""One of four workers is three times slower: what does `shares="speed"` gain?

Every worker sleeps for so long per sample of its batch as a slower device would compute, so that
the cores of this machine do not matter, and trains a small network beside it under all-reduce. Both
sides run alternately; the time is that of whole epochs, with the measuring and the dealing anew in
it, except for the first epoch.

    python benchmarks/shares.py

Target: at least 1.4 times the samples per second of equal shares; the same weights as one worker
with the whole batch to 1e-10, in double precision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import save, spread
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

FEATURES, CLASSES, EPOCHS = 32, 10, 3


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)).double()


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run = fd.init(seed=0)
    model = network()
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))
    slowed = args.slowdown if run.rank == run.size - 1 and run.size > 1 else 1.0
    seconds = 0.0 if run.size == 1 else args.sample_ms / 1000 * slowed
    loader = run.loader(data(args.samples), global_batch_size=args.batch, shares=args.side)
    times = []
    for _ in run.epochs(EPOCHS):
        run.group.barrier()
        began = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            time.sleep(seconds * len(x))
            optimizer.step()
        times.append(time.perf_counter() - began)
    if run.rank == 0:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        found = {"seconds": times, "weights": weights, "batch_size": loader.batch_size}
        args.out.write_text(json.dumps(found))


def measure(args: argparse.Namespace, side: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        options = ["batch", "samples", "sample_ms", "slowdown"]
        command = [sys.executable, "-m", "farandole", "run", "-n", str(workers)]
        command += [__file__, "--side", side, "--out", str(out)]
        for option in options:
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        root = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="over all workers")
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--sample-ms", type=float, default=1.0)
    parser.add_argument("--slowdown", type=float, default=3.0)
    parser.add_argument("--side", choices=["equal", "speed"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.side:
        worker(args)
        return
    serial = torch.tensor(measure(args, "equal", 1)["weights"], dtype=torch.float64)
    rates: dict[str, list[float]] = {"equal": [], "speed": []}
    apart = 0.0
    for number in range(args.rounds):
        for side in ("equal", "speed") if number % 2 else ("speed", "equal"):
            found = measure(args, side, args.workers)
            whole = found["seconds"][1:]
            rates[side].append(args.samples * len(whole) / sum(whole))
            weights = torch.tensor(found["weights"], dtype=torch.float64)
            apart = max(apart, float((weights - serial).abs().max()))
            print(f"{side}: {rates[side][-1]:.0f} samples/s", flush=True)
    ratio = spread(rates["speed"])["median"] / spread(rates["equal"])["median"]
    result = {
        "workers": args.workers,
        "slowdown_of_one": args.slowdown,
        "samples_per_second": {side: spread(values) for side, values in rates.items()},
        "largest_difference_from_one_worker": apart,
        "ratio": ratio,
    }
    save("shares", result)
    print(f"weights differ from those of one worker by at most {apart:.1e}")
    print(f"shares by speed: {ratio:.2f} times the samples per second of equal shares")


if __name__ == "__main__":
    main()

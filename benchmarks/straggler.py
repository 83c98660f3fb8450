"""What does a straggler cost? Steps per second and time to accuracy, from BSP to asynchronous.

Four workers train a small network on Fashion-MNIST through one parameter server. A step takes 10 ms
(it sleeps, so that cores do not matter), and 40 ms for the one of the four that is slowed. Who that
is changes: for the k-th step of everyone one worker is drawn at random (`moving`); or it is always
the last one (`fixed`). With a fixed one a bound can only help for as many steps as it allows: after
that everybody goes at the slow one's pace, whatever the bound, and only `async` escapes.

The parameters are read from the server and tested beside the training, by a process that does
nothing else. All sides run one after the other, in another order in each round; medians count.

    python benchmarks/straggler.py

Target: staleness=4 and async make at least 1.5 times as many steps per second as BSP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import save, spread
from fashion import read
from torch import nn

import farandole as fd
from farandole.server import Cluster, Store, connect
from farandole.sync import parse

SIDES = ("bsp", "1", "2", "4", "8", "16", "async")
WORKERS = 4
TABLE = "torchrun model 0 float32"  # as the strategy calls it: job, group, dtype


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def worker(args: argparse.Namespace) -> None:
    """Trains until the time is up, and writes down how many steps it made."""
    torch.set_num_threads(1)
    run = fd.init(seed=args.seed)
    x, y = read(args.data, "train").tensors
    plain = network()
    model, opt = run.distribute(
        plain,
        torch.optim.SGD(plain.parameters(), args.rate, momentum=args.momentum),
        sync=parse(f"server:staleness={args.side}"),
    )
    draw = torch.Generator().manual_seed(args.seed * 100 + run.rank)
    slow = random.Random(args.seed)
    run.group.barrier()
    steps, end = 0, time.monotonic() + args.seconds
    while time.monotonic() < end:
        slowed = slow.randrange(WORKERS) if args.pattern == "moving" else WORKERS - 1
        began = time.monotonic()
        batch = torch.randint(len(y), (args.batch,), generator=draw)
        opt.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        wanted = args.step * (args.slowdown if slowed == run.rank else 1)
        time.sleep(max(0.0, wanted - (time.monotonic() - began)))
        opt.step()
        steps += 1
    run._session.models.synchronizer_of(model).end_pass()
    Path(args.out, f"{run.rank}.json").write_text(json.dumps(steps))


def measure(args: argparse.Namespace, side: str, pattern: str, seed: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as out,
        Cluster(servers=1, workers=WORKERS) as cluster,
    ):
        command = [sys.executable, __file__, "--side", side, "--pattern", pattern, "--out", out]
        for option in ("data", "seconds", "step", "slowdown", "batch", "rate", "momentum"):
            command += [f"--{option}", str(getattr(args, option))]
        command += ["--seed", str(seed)]
        processes = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **cluster.environment,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORKERS),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(WORKERS),
                    "MASTER_ADDR": "127.0.0.1",
                    "CUDA_VISIBLE_DEVICES": "",  # the network is too small for one
                },
                cwd=out,
            )
            for rank in range(WORKERS)
        ]
        curve = watch(args, cluster, processes)
        steps = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(WORKERS)]
    reached = next((when for when, accuracy in curve if accuracy >= args.target), None)
    return {
        "side": side,
        "pattern": pattern,
        "seed": seed,
        "steps_per_second": sum(steps) / args.seconds,
        "steps": steps,
        "seconds_to_target": reached,
        "best_accuracy": max(accuracy for _, accuracy in curve),
        "final_accuracy": curve[-1][1],
    }


@torch.no_grad()
def watch(
    args: argparse.Namespace, cluster: Cluster, processes: list[subprocess.Popen[bytes]]
) -> list[tuple[float, float]]:
    """(seconds since the first change, accuracy), as often as it can be had."""
    x, y = read(args.data, "t10k").tensors
    model = network()
    sizes = [parameter.numel() for parameter in model.parameters()]
    curve: list[tuple[float, float]] = []
    first, began = None, None
    with connect(cluster.address, cluster.key_file) as store:
        find(store)
        while any(process.poll() is None for process in processes):
            cluster.check()
            flat = store.get(TABLE).view(-1)
            if first is None and flat.any():
                first = flat.clone()
            if first is None or torch.equal(flat, first):
                time.sleep(0.01)
                continue
            began = began or time.monotonic()
            for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
                parameter.copy_(part.view_as(parameter))
            accuracy = float((model(x).argmax(1) == y).float().mean())
            curve.append((time.monotonic() - began, accuracy))
            time.sleep(0.1)
    if any(process.returncode for process in processes):
        raise SystemExit("a worker failed")
    return curve


def find(store: Store) -> None:
    """The workers have made the table by now, or will have soon."""
    for _ in range(600):
        try:
            store.find(TABLE)
            return
        except fd.CommError:
            time.sleep(0.1)
    raise SystemExit("the workers have made no table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--seconds", type=float, default=12.0, help="of training, each side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.01)
    parser.add_argument("--slowdown", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--target", type=float, default=0.84, help="accuracy on the test images")
    parser.add_argument("--patterns", nargs="+", default=["moving", "fixed"])
    parser.add_argument("--name", default="straggler")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--pattern", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        worker(args)
        return
    runs = []
    for turn in range(args.rounds):
        for pattern in args.patterns:
            order = list(SIDES)
            random.Random(turn).shuffle(order)
            for side in order:
                runs.append(measure(args, side, pattern, turn))
                print(json.dumps(runs[-1]), flush=True)
    save(
        args.name,
        {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "summary": summary(runs, args),
            "runs": runs,
        },
    )


def summary(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern in args.patterns:
        of = {
            side: [r for r in runs if (r["side"], r["pattern"]) == (side, pattern)]
            for side in SIDES
        }
        base = [run["steps_per_second"] for run in of["bsp"]]
        for side in SIDES:
            rates = [run["steps_per_second"] for run in of[side]]
            times = [run["seconds_to_target"] or float("inf") for run in of[side]]
            row = {
                "steps_per_second": spread(rates),
                "over_bsp": spread([a / b for a, b in zip(rates, base, strict=True)]),
                "seconds_to_target": sorted(times)[len(times) // 2],
                "final_accuracy": spread([run["final_accuracy"] for run in of[side]]),
            }
            found[f"{pattern} {side}"] = row
            rate, times_bsp, end = (
                row[key]["median"] for key in ("steps_per_second", "over_bsp", "final_accuracy")
            )
            print(
                f"{pattern:7} staleness={side:6} {rate:7.1f} steps/s, {times_bsp:.2f} × bsp, "
                f"{args.target:.0%} after {row['seconds_to_target']:.1f} s, in the end {end:.3f}"
            )
    return found


if __name__ == "__main__":
    main()

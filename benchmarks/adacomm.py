"""AdaComm where communication is the bottleneck: loss by time, on two hosts of two workers.

Every side trains the same network on Fashion-MNIST for the same seconds: allreduce, plain DDP on
gloo, AdaComm, and local SGD with fixed periods. Every few seconds the replicas meet, then the clock
stops and the loss is taken on the same part of the training data. (AdaComm's own clock goes on, so
its decisions come a little early.) A side's final loss is the mean of its last three. Targets:
AdaComm reaches the loss that allreduce ended at in half its time, and ends no higher than the best
fixed period; medians over seeds. It is meant for communication that takes several times as long as
the computing: this is measured first, and --rate and --batch move it. Needs root.

    sudo python benchmarks/adacomm.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator
from itertools import islice
from statistics import fmean, median
from typing import Any

import emulated
import fashion
from emulated import Target
from fashion import evaluate, measure_communication, new_side, training_set
from sides import ALLREDUCE, DDP, Clock, Side, rotated
from torch import Tensor
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.sync import parse

LARGEST_RATIO = 0.5
LAST_MEASUREMENTS = 3
FIRST_STEPS = 8  # before anybody knows how long a step takes
UNREACHED_EPOCHS = 1_000_000  # the clock ends the training, not the epochs

Curve = list[dict[str, float]]
Batches = Generator[tuple[Tensor, Tensor], None, None]


def batches(side: Side, data: TensorDataset, batch: int) -> Batches:
    loader = side.loader(data, batch)
    for _ in side.run.epochs(UNREACHED_EPOCHS):
        yield from loader


def train(
    world: fd.Run,
    args: argparse.Namespace,
    name: str,
    seed: int,
    data: TensorDataset,
    fixed: TensorDataset,
) -> dict[str, Any]:
    side = new_side(world, args, name, seed, learning_rate=args.lr, momentum=args.momentum)
    stream = batches(side, data, args.batch)
    curve: Curve = []
    steps, more = 0, FIRST_STEPS
    clock = Clock(world.group)
    while more:
        for x, y in islice(stream, more):
            side.step(x, y)
        side.meet()
        steps += more
        with clock.paused():
            loss, _ = evaluate(side, fixed)
            curve.append({"seconds": clock.seconds, "steps": steps, "loss": loss})
            more = world.group.broadcast_json(steps_until_next(args, curve))
    stream.close()
    world.print(f"seed {seed}, {name}: loss {final(curve):.4f} after {steps} steps")
    return {
        "curve": curve,
        "link_bytes": clock.link_bytes,
        "bytes_sent": clock.bytes_sent,
        "decisions": side.decisions(),
    }


def steps_until_next(args: argparse.Namespace, curve: Curve) -> int:
    """How many to take before the next measurement; 0 when the time is over, to half an interval.

    Rank 0's clock decides, here and not in every step: no side pays for talk that it would not
    have in a real training.
    """
    before, now = [{"seconds": 0.0, "steps": 0.0}, *curve][-2:]
    left = args.seconds - now["seconds"]
    if left < args.every / 2:
        return 0
    steps_per_second = (now["steps"] - before["steps"]) / (now["seconds"] - before["seconds"])
    steps: int = round(min(left, args.every) * steps_per_second)
    return max(1, steps)


def final(curve: Curve) -> float:
    return fmean(point["loss"] for point in curve[-LAST_MEASUREMENTS:])


def seconds_to(curve: Curve, loss: float) -> float:
    """Of the first measurement that is as low; infinite if none is."""
    return next((point["seconds"] for point in curve if point["loss"] <= loss), math.inf)


def work(world: fd.Run, args: argparse.Namespace) -> dict[str, Any]:
    data = training_set(args, world.size)
    fixed = TensorDataset(*data[: args.loss_samples])
    communication = measure_communication(world, args, data)
    sides = [ALLREDUCE, args.adacomm, DDP, *fixed_sides(args)]
    seeds: dict[str, dict[str, Any]] = {}
    for turn, seed in enumerate(args.seeds):
        seeds[str(seed)] = {
            name: train(world, args, name, seed, data, fixed) for name in rotated(sides, turn)
        }
    return {"communication": communication, "seeds": seeds}


def fixed_sides(args: argparse.Namespace) -> list[str]:
    return [f"local:every={period}" for period in args.periods]


def judged(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over seeds, for every side: its final loss, and its time to what each synchronous
    side ended at, over that side's own time to it."""
    runs = [
        {name: side["curve"] for name, side in seed.items()} for seed in found["seeds"].values()
    ]
    sides: dict[str, dict[str, Any]] = {}
    for name in [ALLREDUCE, DDP, args.adacomm, *fixed_sides(args)]:
        row: dict[str, float | None] = {"final_loss": median(final(run[name]) for run in runs)}
        for sync in (ALLREDUCE, DDP):
            goals = [final(run[sync]) for run in runs]
            times = [seconds_to(run[name], goal) for run, goal in zip(runs, goals, strict=True)]
            theirs = [seconds_to(run[sync], goal) for run, goal in zip(runs, goals, strict=True)]
            row[f"seconds_to_loss_of_{sync}"] = finite(median(times))
            ratios = [a / b for a, b in zip(times, theirs, strict=True)]
            row[f"ratio_to_{sync}"] = finite(median(ratios))
        sides[name] = row
    best = min(fixed_sides(args), key=lambda name: sides[name]["final_loss"])
    return {**found, "sides": sides, "best_fixed_period": best}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def targets_of(result: dict[str, Any], adacomm: str) -> list[Target]:
    ours, best = result["sides"][adacomm], result["best_fixed_period"]
    targets = [
        Target(
            f"ratio AdaComm / {sync}, time to what {sync} ended at",
            ours[f"ratio_to_{sync}"],
            LARGEST_RATIO,
        )
        for sync in (ALLREDUCE, DDP)
    ]
    loss_ratio = ours["final_loss"] / result["sides"][best]["final_loss"]
    return [*targets, Target(f"ratio AdaComm / {best}, final loss", loss_ratio, 1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_options(parser, rate="10mbit", workers_per_host=2, save_as="adacomm")
    fashion.add_options(parser, samples=60_000, batch=16)
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, for every side")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between measurements")
    parser.add_argument("--loss-samples", type=int, default=1000, help="to take the loss on")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--adacomm", default="adacomm:start=16,seconds=10", help="its text")
    parser.add_argument("--periods", type=int, nargs="+", default=[2, 4, 8, 16], help="fixed ones")
    args = parser.parse_args()
    parse(args.adacomm)  # a misspelt option is found now, not after the sides before it
    result = judged(emulated.on_hosts(args, work), args)
    times = result["communication"][ALLREDUCE]["communication_over_compute"]
    print(f"communication takes {times:.1f} times as long as computing (several times is wanted)")
    for name, row in result["sides"].items():
        reached = row[f"seconds_to_loss_of_{ALLREDUCE}"]
        when = "never" if reached is None else f"after {reached:.1f} s"
        print(f"{name}: final loss {row['final_loss']:.4f}; at allreduce's loss {when}")
    emulated.keep(args, result, targets_of(result, args.adacomm))


if __name__ == "__main__":
    main()

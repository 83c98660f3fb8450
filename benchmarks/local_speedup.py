"""Is local SGD as much faster as its formula says? Steps under `local:every=τ` on two hosts.

Averaging every τ steps instead of every step should be (1 + α) / (1 + α/τ) times as fast, where α
is the time of an averaging over that of a step. Both are measured apart: the step in blocks in
which nobody meets, the averaging by itself after a step that is not timed. The sides take turns in
blocks of steps; a block is compared with that of τ = 1 in the same round, and medians count.
Target: within 15 % of the formula at every τ. Beside it: each τ against plain DDP on gloo and
against allreduce. A side trains on the same batch over and over: input costs nothing. Needs root.

    sudo python benchmarks/local_speedup.py
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import emulated
import torch
from common import spread
from emulated import Target
from sides import ALLREDUCE, DDP, Side, rotated, timed
from torch import Tensor

import farandole as fd
from farandole.models import build

PERIODS = (1, 2, 4, 8, 16)
LARGEST_ERROR = 0.15
ALONE = "local:every=1000000"  # no block is as long: nobody meets unless told to


def new_side(world: fd.Run, name: str, hidden: list[int]) -> Side:
    torch.manual_seed(0)
    model = build("mlp", classes=10, image_size=28, channels=1, hidden=hidden)
    return Side(world, name, model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


def steps(side: Side, x: Tensor, y: Tensor, count: int) -> None:
    for _ in range(count):
        side.step(x, y)


def averagings(side: Side, x: Tensor, y: Tensor, count: int) -> list[float]:
    """Seconds of `count` of them, each after one step so that there is something to average."""
    taken = []
    for _ in range(count):
        side.step(x, y)
        taken.append(timed(side.run.group, side.meet))
    return taken


def work(world: fd.Run, args: argparse.Namespace) -> dict[str, Any]:
    names = [ALONE, *(f"local:every={period}" for period in PERIODS), ALLREDUCE, DDP]
    sides = [new_side(world, name, args.hidden) for name in names]
    torch.manual_seed(1 + world.rank)
    x, y = torch.randn(args.batch, 1, 28, 28), torch.randint(10, (args.batch,))
    for side in sides:
        steps(side, x, y, max(PERIODS))
    averagings(sides[0], x, y, 2)

    seconds: dict[str, list[float]] = {name: [] for name in names}
    averaging: list[float] = []
    for turn in range(args.rounds):
        for side in rotated(sides, turn):
            taken = timed(world.group, partial(steps, side, x, y, args.steps))
            seconds[side.name].append(taken / args.steps)
            if side.name == ALONE:
                averaging += averagings(side, x, y, 4)
        world.print(f"round {turn + 1} of {args.rounds}")
    parameters = sum(parameter.numel() for parameter in sides[0].plain.parameters())
    return {"parameters": parameters, "step_seconds": seconds, "averaging_seconds": averaging}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """α, and for every τ the speed-ups by the formula and by the clock."""
    seconds = found["step_seconds"]
    step, averaging = median(seconds[ALONE]), median(found["averaging_seconds"])
    alpha = averaging / step
    periods = {}
    for period in PERIODS:
        name = f"local:every={period}"
        predicted = (1 + alpha) / (1 + alpha / period)
        measured = speedup(seconds[name], seconds["local:every=1"])
        periods[str(period)] = {
            "predicted": predicted,
            "measured": measured,
            "relative_error": abs(measured / predicted - 1),
            "over_ddp": speedup(seconds[name], seconds[DDP]),
            "over_allreduce": speedup(seconds[name], seconds[ALLREDUCE]),
        }
    return {
        "alpha": alpha,
        "step_alone_ms": 1000 * step,
        "averaging_ms": 1000 * averaging,
        "parameters": found["parameters"],
        "step_ms": {
            name: {quantile: 1000 * value for quantile, value in spread(values).items()}
            for name, values in seconds.items()
        },
        "periods": periods,
    }


def median(values: list[float]) -> float:
    return spread(values)["median"]


def speedup(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds: how many times as fast ours is."""
    return median([b / a for a, b in zip(ours, theirs, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_options(parser, rate="1gbit", workers_per_host=1, save_as="local_speedup")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 1024, 1024])
    parser.add_argument("--batch", type=int, default=192, help="per worker")
    parser.add_argument("--steps", type=int, default=16, help="in a block: a multiple of 16")
    parser.add_argument("--rounds", type=int, default=15, help="of a block of every side")
    args = parser.parse_args()
    if args.steps < 1 or args.steps % max(PERIODS):
        sys.exit(f"--steps {args.steps}: a block holds whole periods, so a multiple of 16 steps.")
    result = judged(emulated.on_hosts(args, work))
    print(
        f"a step {result['step_alone_ms']:.1f} ms, an averaging {result['averaging_ms']:.1f} ms: "
        f"α = {result['alpha']:.2f}"
    )
    for period, row in result["periods"].items():
        print(
            f"τ = {period}: {row['measured']:.2f} times as fast as τ = 1, by the formula "
            f"{row['predicted']:.2f}; {row['over_ddp']:.2f} times DDP on gloo, "
            f"{row['over_allreduce']:.2f} times allreduce"
        )
    errors = {period: row["relative_error"] for period, row in result["periods"].items()}
    targets = [
        Target(f"relative error of the formula at τ = {period}", error, LARGEST_ERROR)
        for period, error in errors.items()
        if period != "1"  # it is 1 on both sides
    ]
    emulated.keep(args, result, targets)


if __name__ == "__main__":
    main()

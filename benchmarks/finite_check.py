"""What does it cost to look at every gradient before it is applied?

The same model twice in the same processes, once with `check_finite` and once without, taking turns
in blocks of steps: the median over blocks of the ratio of neighbouring blocks. On a machine that
other work shares that ratio is noisy. So the time inside the check is measured too, as a share of
the steps around it. Target for both: at most 3 % of a step.

    python benchmarks/finite_check.py
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread

import farandole as fd
from farandole.models import build
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.common.guard import GradientGuard

CASES = {
    "small_cnn": {"image_size": 28, "channels": 1, "batch": 64, "steps_per_block": 20},
    "resnet50": {"image_size": 64, "channels": 3, "batch": 8, "steps_per_block": 1},
}


class Stopwatch:
    """Adds up the time that is spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def steps(
    model: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, count: int
) -> None:
    for _ in range(count):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(run: fd.Run, inside: Stopwatch, name: str, blocks: int) -> dict[str, object]:
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(name, classes=10, image_size=case["image_size"], channels=case["channels"])
    torch.manual_seed(1 + run.rank)
    side_length = case["image_size"]
    x = torch.randn(case["batch"], case["channels"], side_length, side_length, device=run.device)
    y = torch.randint(10, (case["batch"],), device=run.device)
    sides = {}
    for side in ("unchecked", "checked"):
        own = fd.Run(
            run.group,
            run.topology,
            run.device,
            settings=run.settings,
            name="finite",
            check_finite=side == "checked",
        )
        model = copy.deepcopy(plain)
        opt = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
        sides[side] = own.distribute(model, opt)
        steps(*sides[side], x, y, 3)

    inside.seconds = 0.0
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(blocks):
        for side in list(sides)[:: 1 if block % 2 else -1]:
            run.group.barrier()
            begin = time.perf_counter()
            steps(*sides[side], x, y, case["steps_per_block"])
            seconds[side].append((time.perf_counter() - begin) / case["steps_per_block"])
    ratios = [a / b for a, b in zip(seconds["checked"], seconds["unchecked"], strict=True)]
    return {
        "ratio": spread(ratios),
        "share_inside": inside.seconds / (sum(seconds["checked"]) * case["steps_per_block"]),
        "inside_ms": 1000 * inside.seconds / (blocks * case["steps_per_block"]),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "parameters": sum(parameter.numel() for parameter in plain.parameters()),
        "blocks": blocks,
        **case,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--result", default="finite_check", help="name of the result file")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.init()
    inside = Stopwatch()
    GradientGuard.look = inside.around(GradientGuard.look)  # before the average's result is applied
    Bucket.note = inside.around(Bucket.note)  # before each bucket is averaged
    results = {name: measure(run, inside, name, args.blocks) for name in args.models}
    if run.rank == 0:
        save(args.result, {"workers": run.size, "target_ratio": 1.03, "models": results})
        for name, found in results.items():
            steps_ms = {side: round(ms, 2) for side, ms in found["step_ms"].items()}
            print(f"{name}: {steps_ms} ms a step, ratio {found['ratio']['median']:.3f}")
            print(f"  {found['inside_ms']:.2f} ms inside, {found['share_inside']:.2%} of a step")


if __name__ == "__main__":
    main()

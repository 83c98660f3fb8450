"""A training step under `run.distribute` against one under plain DDP on gloo.

Both sides live in the same processes, on the same data, and take turns in blocks of steps; the
median over blocks of the ratio of neighbouring blocks is what counts. Targets: at most 0.9 for the
small CNN, never above 1. With 2 workers the weights must be the same to the last bit.

    python benchmarks/ddp_parity.py
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.models import build

CNN = {"model": "small_cnn", "image_size": 28, "channels": 1, "warm_steps": 20, "target": 0.9}
CASES = {
    "small_cnn, batch 64": {**CNN, "batch": 64, "steps_per_block": 20},
    "small_cnn, batch 32": {**CNN, "batch": 32, "steps_per_block": 20},
    "small_cnn, batch 16": {**CNN, "batch": 16, "steps_per_block": 20},
    "resnet18, batch 8": {
        "model": "resnet18",
        "image_size": 32,
        "channels": 3,
        "warm_steps": 4,
        "target": 1.0,
        "batch": 8,
        "steps_per_block": 2,
    },
}


def steps(
    model: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, count: int
) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return (time.perf_counter() - begin) / count


def measure(run: fd.Run, name: str, blocks: int) -> dict[str, object]:
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(
        case["model"], classes=10, image_size=case["image_size"], channels=case["channels"]
    )
    ours = copy.deepcopy(plain)
    torch.manual_seed(1 + run.rank)
    x = torch.randn(case["batch"], case["channels"], case["image_size"], case["image_size"])
    y = torch.randint(10, (case["batch"],))

    ddp = DistributedDataParallel(plain)
    ddp_opt = torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)
    ours_opt = torch.optim.SGD(ours.parameters(), 0.01, momentum=0.9)
    ours, ours_opt = run.distribute(ours, ours_opt)

    steps(ddp, ddp_opt, x, y, case["warm_steps"])
    steps(ours, ours_opt, x, y, case["warm_steps"])
    ddp_state = ddp.module.state_dict()
    same = all(
        torch.equal(ddp_state[key], value) for key, value in run.unwrap(ours).state_dict().items()
    )

    seconds: dict[str, list[float]] = {"ddp": [], "ours": []}
    for block in range(blocks):
        sides = [("ddp", ddp, ddp_opt), ("ours", ours, ours_opt)]
        for side, model, opt in sides if block % 2 else reversed(sides):
            run.group.barrier()
            seconds[side].append(steps(model, opt, x, y, case["steps_per_block"]))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["ddp"], strict=True)]
    return {
        "ratio": spread(ratios),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "same_bits_after_warm_steps": same,
        "blocks": blocks,
        **case,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--result", default="ddp_parity", help="name of the result file")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.init()
    results = {name: measure(run, name, args.blocks) for name in CASES}
    if run.rank == 0:
        save(args.result, {"workers": run.size, "cases": results})
        for name, result in results.items():
            bits = "same bits" if result["same_bits_after_warm_steps"] else "other bits"
            steps_ms = {side: round(ms, 2) for side, ms in result["step_ms"].items()}
            print(f"{name}: {steps_ms} ms a step, {bits} after the warm-up")
        for name, result in results.items():
            print(f"ratio {name} {result['ratio']['median']:.3f}")


if __name__ == "__main__":
    main()

"""Horovod's calls on Farandole against PyTorch's own: training steps, and all-reduces by size.

Training: `hvd.DistributedOptimizer` against DistributedDataParallel on gloo, the same model and
data. All-reduce: `hvd.allreduce_` (in place) and `hvd.allreduce` (a new tensor) against
`dist.all_reduce` on gloo, which works in place. The sides live in the same processes and take turns
in blocks; the median over blocks of the ratio of neighbouring blocks is what counts. Targets: a
step at most 1.1, an all-reduce at most 1 at every size.

    python benchmarks/horovod_style.py --workers 2
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import restart_on_workers, save, spread
from ddp_parity import steps
from torch.nn.parallel import DistributedDataParallel

import farandole.horovod.torch as hvd
from farandole.bench.comm.sizes import format_size
from farandole.models import build

CNN = {"model": "small_cnn", "image_size": 28, "channels": 1, "warm_steps": 20}
RESNET = {"model": "resnet18", "image_size": 32, "channels": 3, "warm_steps": 4}
CASES = {
    "small_cnn, batch 64": {**CNN, "batch": 64, "steps_per_block": 20},
    "small_cnn, batch 16": {**CNN, "batch": 16, "steps_per_block": 20},
    "resnet18, batch 8": {**RESNET, "batch": 8, "steps_per_block": 2},
}
SIZES = {4 * 2**10: 200, 256 * 2**10: 100, 4 * 2**20: 20, 32 * 2**20: 4}  # bytes: calls in a block
GLOO, IN_PLACE, NEW = "gloo", "hvd.allreduce_", "hvd.allreduce"


def train(name: str, blocks: int) -> dict[str, object]:
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(
        case["model"], classes=10, image_size=case["image_size"], channels=case["channels"]
    )
    ours = copy.deepcopy(plain)
    torch.manual_seed(1 + hvd.rank())
    x = torch.randn(case["batch"], case["channels"], case["image_size"], case["image_size"])
    y = torch.randint(10, (case["batch"],))

    ddp = DistributedDataParallel(plain)
    ddp_opt = torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)
    ours_opt = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), 0.01, momentum=0.9),
        named_parameters=ours.named_parameters(),
    )
    sides = [("ddp", ddp, ddp_opt), ("hvd", ours, ours_opt)]
    for _, model, opt in sides:
        steps(model, opt, x, y, case["warm_steps"])
    seconds: dict[str, list[float]] = {"ddp": [], "hvd": []}
    for block in range(blocks):
        for side, model, opt in sides if block % 2 else reversed(sides):
            dist.barrier()
            seconds[side].append(steps(model, opt, x, y, case["steps_per_block"]))
    ratios = [a / b for a, b in zip(seconds["hvd"], seconds["ddp"], strict=True)]
    return {
        "ratio": spread(ratios),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "largest_difference_of_weights": max(
            float((a - b).detach().abs().max())
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
        ),
        "blocks": blocks,
        "target": 1.1,
        **case,
    }


def all_reduces(size: int, blocks: int) -> dict[str, object]:
    tensor = torch.ones(size // 4)
    calls: dict[str, Callable[[], object]] = {
        GLOO: lambda: dist.all_reduce(tensor),
        IN_PLACE: lambda: hvd.allreduce_(tensor, name="tensor", op=hvd.Sum),
        NEW: lambda: hvd.allreduce(tensor, name="tensor", op=hvd.Sum),
    }
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for block in range(blocks + 1):
        order = list(calls)
        for side in order[block % 3 :] + order[: block % 3]:
            tensor.fill_(0.0)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(SIZES[size]):
                calls[side]()
            seconds[side].append((time.perf_counter() - begin) / SIZES[size])
    for values in seconds.values():
        values.pop(0)  # the first block warms up
    return {
        "ratio": {
            side: spread([a / b for a, b in zip(seconds[side], seconds[GLOO], strict=True)])
            for side in (IN_PLACE, NEW)
        },
        "us": {side: 1e6 * spread(values)["median"] for side, values in seconds.items()},
        "blocks": blocks,
        "calls_per_block": SIZES[size],
        "target": 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--result", help="name of the result file [horovod_style_<N>_workers]")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    hvd.init()
    dist.init_process_group("gloo")
    reduced = {format_size(size): all_reduces(size, args.blocks) for size in SIZES}
    trained = {name: train(name, args.blocks) for name in CASES}
    if hvd.rank() == 0:
        name = args.result or f"horovod_style_{hvd.size()}_workers"
        save(name, {"workers": hvd.size(), "training": trained, "allreduce": reduced})
        for case, result in trained.items():
            milliseconds = {side: round(ms, 2) for side, ms in result["step_ms"].items()}
            print(f"{case}: {milliseconds} ms a step")
        for size, result in reduced.items():
            print(f"{size}: { {side: round(us) for side, us in result['us'].items()} } us")
        for case, result in trained.items():
            print(f"ratio {case} {result['ratio']['median']:.3f}")
        for size, result in reduced.items():
            for side, ratio in result["ratio"].items():
                print(f"ratio {side} {size} {ratio['median']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What does it cost that a run saves by itself: to decide when, and to save?

The same model in the same processes, without automatic checkpoints and with them, taking turns in
blocks of steps: the median over blocks of the ratio of neighbouring blocks. On a machine that other
work shares that ratio is noisy. So the time inside the places between two steps is measured too, as
a share of the steps around them. `every=1h` only decides, `every=10s` also saves. Target for
deciding: below 1 % of a step.

    python benchmarks/automatic_saves.py
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread

import farandole as fd
from farandole.models import build
from farandole.train.checkpoint.automatic.policy import parse_checkpoints
from farandole.train.checkpoint.automatic.saves import AutomaticSaves

POLICIES = {"decides": "every=1h,best=accuracy", "saves": "every=10s,keep=1"}
CASES = {
    "linear": {"batch": 1, "steps_per_block": 300},  # steps as short as they can be
    "small_cnn": {"batch": 64, "steps_per_block": 20},
}


class Inside:
    """Notes the times that a run spends between two steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        within = AutomaticSaves.between_steps

        def timed(saves: AutomaticSaves, *, within_pass: bool) -> None:
            begin = time.perf_counter()
            within(saves, within_pass=within_pass)
            self.seconds.append(time.perf_counter() - begin)

        AutomaticSaves.between_steps = timed


def measure(run: fd.Run, inside: Inside, name: str, blocks: int, folder: Path) -> dict[str, object]:
    case = CASES[name]
    plain = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        if name == "linear"
        else build(name, classes=10, image_size=28, channels=1)
    )
    count, batch = case["steps_per_block"], case["batch"]
    images = torch.randn(count * batch * run.size, 1, 28, 28)
    data = torch.utils.data.TensorDataset(images, torch.randint(10, (len(images),)))
    sides = {}
    for side in ("none", *POLICIES):
        own = fd.Run(
            run.group,
            run.topology,
            run.device,
            settings=run.settings,
            name=f"{name}-{side}",
            folder=folder,
            checkpoints=parse_checkpoints(POLICIES[side]) if side in POLICIES else None,
        )
        model = copy.deepcopy(plain)
        opt = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
        sides[side] = (own, *own.distribute(model, opt))

    seconds: dict[str, list[float]] = {side: [] for side in sides}
    within: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(blocks + 1):
        for side in list(sides)[:: 1 if block % 2 else -1]:
            own, model, opt = sides[side]
            run.group.barrier()
            inside.seconds = []
            begin = time.perf_counter()
            for x, y in own.loader(data, batch_size=batch):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()
            if block:  # the first one warms up
                seconds[side].append((time.perf_counter() - begin) / count)
                within[side] += inside.seconds
    for own, _, _ in sides.values():
        own.close()
    return {
        **case,
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "ratio": {
            side: spread([a / b for a, b in zip(seconds[side], seconds["none"], strict=True)])
            for side in POLICIES
        },
        "share_inside": {
            side: sum(within[side]) / (sum(seconds[side]) * count) for side in POLICIES
        },
        "inside_microseconds": {
            side: {"mean": 1e6 * sum(within[side]) / (blocks * count)}
            | {name: 1e6 * value for name, value in spread(within[side]).items()}
            for side in POLICIES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--result", default="automatic_saves", help="name of the result file")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.init(timeout=200)
    folder = Path(run.group.broadcast_json(tempfile.mkdtemp(prefix="automatic-saves-")))
    inside = Inside()
    try:
        results = {name: measure(run, inside, name, args.blocks, folder) for name in CASES}
        run.group.barrier()
    finally:
        if run.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if run.rank == 0:
        result = {"workers": run.size, "target_share": 0.01, "policies": POLICIES}
        save(args.result, {**result, "models": results})
        for name, found in results.items():
            for side in POLICIES:
                spent = found["inside_microseconds"][side]
                print(
                    f"{name}, {POLICIES[side]}: inside {spent['mean']:.1f} µs (median "
                    f"{spent['median']:.1f}) of {found['step_ms'][side]:.2f} ms, "
                    f"{found['share_inside'][side]:.2%}; "
                    f"ratio {found['ratio'][side]['median']:.3f}"
                )


if __name__ == "__main__":
    main()

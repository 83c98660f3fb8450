"""What does a save in the background cost the steps beside it?

ResNet-50 with SGD and momentum (204 MB to save) trains in blocks: some steps without a save, then
the same number while a checkpoint is written, in turns. Steps are timed as `during` as long as the
file is being written when they begin; the copy of the state, which the script waits for, is timed
apart. At last, what a save costs that is waited for. Target: a step during a save at most 1.1 of a
normal one (medians).

    python benchmarks/async_save.py
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread

import farandole as fd
from farandole.models import build


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--model", default="resnet50")
    options.add_argument("--image-size", type=int, default=64)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--blocks", type=int, default=8)
    options.add_argument("--steps", type=int, default=6, help="of a block without a save")
    options.add_argument("--folder", type=Path, help="the disk to write to [the temporary folder]")
    asked = options.parse_args()
    restart_on_workers(asked.workers)
    parent = asked.folder or Path(tempfile.gettempdir())
    folder = parent / "farandole-async-save"
    run = fd.init(folder=folder, name="run")
    try:
        measure(run, asked)
    finally:
        run.group.barrier()
        if run.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def measure(run: fd.Run, asked: argparse.Namespace) -> None:
    model = build(asked.model, classes=1000, image_size=asked.image_size, channels=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model, optimizer = run.distribute(model, optimizer)
    torch.manual_seed(run.rank)
    x = torch.randn(asked.batch, 3, asked.image_size, asked.image_size, device=run.device)
    y = torch.randint(1000, (asked.batch,), device=run.device)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    run.save(background=True, keep=1)  # the first one makes the buffers
    run.wait_for_save()
    normal, during, copies, written, blocking = [], [], [], [], []
    for _ in range(asked.blocks):
        normal += [step() for _ in range(asked.steps)]
        began = time.perf_counter()
        target = run.save(background=True, keep=1)
        copies.append(time.perf_counter() - began)
        beside = []
        # All ranks must do the same number of steps: rank 0, which commits, decides.
        while run.group.broadcast_json(not target.exists() and len(beside) < 200):
            beside.append(step())
        written.append(time.perf_counter() - began)
        during += beside
        run.wait_for_save()
        began = time.perf_counter()
        run.save(keep=1)
        blocking.append(time.perf_counter() - began)
    if run.rank:
        return
    ratio = spread(during)["median"] / spread(normal)["median"]
    size = sum(p.nbytes for p in model.state_dict().values())
    result = {
        "model": asked.model,
        "workers": run.size,
        "batch": asked.batch,
        "image_size": asked.image_size,
        "megabytes": round(2 * size / 1e6),
        "step_seconds": spread(normal),
        "step_during_save_seconds": spread(during),
        "steps_during_saves": len(during),
        "copy_seconds": spread(copies),
        "until_committed_seconds": spread(written),
        "blocking_save_seconds": spread(blocking),
        "ratio": ratio,
        "target": 1.1,
    }
    save("async_save", result)
    for name in ("step", "step_during_save", "copy", "until_committed", "blocking_save"):
        print(f"{name:<18} {result[f'{name}_seconds']['median'] * 1e3:8.1f} ms")
    print(f"ratio: a step during a save / a normal one = {ratio:.3f} (target: 1.1 or less)")


if __name__ == "__main__":
    main()

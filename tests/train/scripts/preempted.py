"""Trains slowly and for long, and saves when it is told to stop. Resumed, it says where it goes on.

Usage: preempted.py [plain | accumulate | own-data | slow-save | stuck | dataloader]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"
STEP_SECONDS = 0.02


def main() -> None:
    run = fd.init(name="preempted", timeout=150)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = run.distribute(model, optimizer)
    steps = torch.zeros(())

    def state() -> dict[str, torch.Tensor]:
        if MODE == "slow-save":
            Path(f"saving-{run.rank}").touch()
            time.sleep(600)
        return {"steps": steps}

    run.save_when_stopped(state=state)
    loaded = run.load()
    if loaded is not None:
        steps = loaded["steps"]
        print(f"went on after {int(steps)} steps, run.steps {run.steps}", flush=True)
        print(f"bias {model.bias.item():.0f}", flush=True)
        return
    data = TensorDataset(torch.ones(100_000, 1))
    if MODE in ("slow-save", "stuck"):
        run.save(steps=steps)
    source = DataLoader(data, batch_size=2, num_workers=1) if MODE == "dataloader" else data
    batches = iter(lambda: (torch.ones(2, 1),), None)
    if MODE != "own-data":
        batches = run.loader(source, 2)
    for number, (x,) in enumerate(batches):
        time.sleep(STEP_SECONDS)
        # The gradient of the bias is -1: it counts the steps.
        (model(x * 0).sum() / len(x) * -1 / (4 if MODE == "accumulate" else 1)).backward()
        if MODE != "accumulate" or number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if number == 3:
            Path(f"ready-{run.rank}").write_text(str(os.getpid()))
        if MODE == "stuck" and number == 5 and run.rank == 1:
            time.sleep(600)
        if MODE == "own-data":
            run.end_step()


main()

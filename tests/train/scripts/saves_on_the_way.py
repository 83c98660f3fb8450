"""Trains for long, slowly, and says what each rank has read after which step. Saves nothing itself.

Usage: saves_on_the_way.py FOLDER [SECONDS of a step]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import farandole as fd

EPOCHS, SAMPLES = 3, 96
FOLDER, STEP_SECONDS = Path(sys.argv[1]), float(sys.argv[2])


def main() -> None:
    run = fd.init(timeout=150)
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    trainer = run.trainer(model, nn.functional.mse_loss, lambda ps: torch.optim.SGD(ps, 1e-6))
    data = [(torch.tensor([float(index)]), torch.zeros(1)) for index in range(SAMPLES)]
    seen = FOLDER / f"seen-{os.getpid()}"
    with seen.open("w", buffering=1) as file:
        for epoch in run.epochs(EPOCHS):
            for x, y in trainer.loader(data, batch_size=4):
                trainer.step(x, y)
                time.sleep(STEP_SECONDS)
                line = {
                    "rank": run.rank,
                    "steps": run.steps,
                    "epoch": epoch,
                    "samples": x.flatten().int().tolist(),
                }
                file.write(json.dumps(line) + "\n")


main()

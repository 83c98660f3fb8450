"""Rank 1 is killed in its first epoch; the job goes on, until it has come back and taken part."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import farandole as fd

run = fd.init(timeout=150)
model = torch.nn.Linear(2, 1)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
data = [(torch.ones(2), torch.zeros(1))] * 16
for _ in run.epochs(60):
    for x, y in run.loader(data, batch_size=2):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        if run.rank == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.rank == 1:
            Path("came-back").touch()
        elif not Path("came-back").exists():
            time.sleep(0.1)
print(f"rank {run.rank} has come to the end")

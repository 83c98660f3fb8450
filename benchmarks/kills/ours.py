"""The training script for `farandole run`: FOLDER SECONDS. Nothing in it is about losses."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn import functional

import farandole as fd
from kills.task import GLOBAL_BATCH, Notes, Numbers, new_model, new_optimizer

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
run = fd.init(folder=folder / "runs", name="ours")
worker = os.environ.get("FARANDOLE_ELASTIC_WORKER", str(run.rank))
notes = Notes(folder, worker)
model = new_model()
model, optimizer = run.distribute(model, new_optimizer(model))
data = Numbers()
began = folder / "began"
is_over = False
for epoch in run.epochs(1_000_000):
    for x, y, samples in run.loader(data, global_batch_size=GLOBAL_BATCH):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        notes.reads(run.steps, epoch, samples.tolist())
        loss.backward()
        optimizer.step()
        notes.stepped(run.steps)
        if run.rank == 0 and not began.exists():
            began.write_text(str(time.monotonic()))
    # All ranks decide the same, once an epoch. Nobody has the time of the first step but this file.
    late = time.monotonic() - float(began.read_text()) > seconds
    is_over = run.sum(float(late)) > 0
    if is_over:
        break
torch.save(list(model.parameters()), folder / f"weights-{worker}")

"""Trains where the second rank's third batch is NaN. Writes down how that ended, for each rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

run = fd.init(timeout=20)
torch.manual_seed(0)
model = nn.Linear(64, 4)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
facts: dict[str, object] = {"error": None, "steps": 0}
try:
    for (x,) in run.loader(TensorDataset(torch.randn(48, 64)), batch_size=4):
        optimizer.zero_grad()
        (model(x * (torch.nan if run.rank == 1 and run.steps == 3 else 1.0)) ** 2).mean().backward()
        optimizer.step()
        facts["steps"] = run.steps
except fd.DivergedError as error:
    facts["error"] = str(error)
    raise
finally:
    facts["is_finite"] = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    (Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps(facts))

"""Trains a number for two steps, and prints what this rank knows as one line of JSON."""

import json
import os
import sys

import torch
from torch import nn

import farandole as fd

run = fd.init(timeout=150)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
for _ in range(2):
    optimizer.zero_grad()
    # The gradient of this rank is -(rank + 1), and that of all of them the mean.
    (-model(torch.full((1, 1), run.rank + 1.0))).sum().backward()
    optimizer.step()
facts = {
    "rank": run.rank,
    "size": run.size,
    "local": [run.local_rank, run.local_size],
    "weight": model.weight.item(),
    "transport": run.group.transport.name,
    "name": run.name,
    "seed": run.seed,
    "arguments": sys.argv[1:],
    "variables": {name: value for name, value in os.environ.items() if name.startswith("TRY_")},
}
# In one piece: print writes several, and other launchers let those of two ranks meet in a line.
sys.stdout.write(f"trained {json.dumps(facts)}\n")
run.group.barrier()

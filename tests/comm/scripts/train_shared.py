"""Trains for a few steps with gradients that are worth registering; says what carried them."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import farandole as fd
from farandole.comm import SharedMemory

folder, how = Path(sys.argv[1]), sys.argv[2]
run = fd.init(timeout=150)
torch.manual_seed(0)
model = torch.nn.Linear(1500, 1500)
model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(5):
    opt.zero_grad()
    model(torch.full((4, 1500), run.rank + 1.0)).square().mean().backward()
    opt.step()
(gradient,) = [p.grad for p in run.unwrap(model).parameters() if p.dim() == 2]
facts = {
    "transport": run.group.transport.name,
    "shared": gradient.untyped_storage().is_shared(),
    "in_step": bool(run.check_in_step(model)),
    "memory": isinstance(run.group.transport, SharedMemory),
}
(folder / f"{run.rank}.json").write_text(json.dumps(facts))
if how == "die":
    run.group.barrier()
    os.kill(os.getpid(), signal.SIGKILL)

"""Trains under parameter servers. In the middle of an epoch, those that the arguments name are
killed: `worker` (rank 2, in the second epoch), `server` (one of them, in the third)."""

import os
import signal
import sys

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

EPOCHS, STEPS = 4, 10
doomed = set(sys.argv[1:])


def end_of(name: str, epoch: int, step: int) -> None:
    if name not in doomed or step != STEPS // 2:
        return
    if name == "worker" and epoch == 1 and run.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "server" and epoch == 2 and run.rank == 0:
        children = psutil.Process(os.getppid()).children()
        next(child for child in children if "farandole.server" in child.cmdline()).kill()


run = fd.init(timeout=150, seed=1)
centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) * 2
labels = torch.arange(STEPS * 30) % 4
noise = torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(2))
data = TensorDataset(centres[labels] + noise, labels)
model = nn.Linear(8, 4)
wrapped, optimizer = run.distribute(
    model, torch.optim.SGD(model.parameters(), 0.2), sync=fd.Server()
)
for epoch in run.epochs(EPOCHS):
    for step, (x, y) in enumerate(run.loader(data, global_batch_size=30)):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        for name in ("worker", "server"):
            end_of(name, epoch, step)
    right = (model(data.tensors[0]).argmax(1) == labels).float().mean()
    accuracy, present = run.mean(float(right)), run.sum(1)
    assert run.check_in_step(wrapped)
    run.log(epoch=epoch, accuracy=accuracy, present=present)
run.print(f"end {accuracy:.3f}")

"""resumed.py FILE STRATEGY: trains half of its epochs, or the rest from the checkpoint of the half.

The second time it keeps the weights of all ranks. On the CPU and on a GPU it must end alike: what a
strategy remembers is read into memory of the host, and used on the device.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.sync import parse

EPOCHS = 4


def main() -> None:
    path, text = sys.argv[1:]
    run = fd.init(timeout=100)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)).double().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.distribute(model, optimizer, sync=parse(text))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(60 * run.size, 12, generator=generator, dtype=torch.float64)
    source = TensorDataset(x, torch.randint(5, (len(x),), generator=generator))
    resumes = run.load() is not None
    for epoch in run.epochs(EPOCHS):
        for inputs, labels in run.loader(source, batch_size=6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            run.observe_loss(loss.item())
            optimizer.step()
        if not resumes and epoch == EPOCHS // 2 - 1:
            run.save()
            run.print("half of it")
            return
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    everyones = torch.stack(run.group.all_gather(own))
    if run.rank == 0:
        np.save(path, everyones.numpy())
    run.print("all of it")


main()

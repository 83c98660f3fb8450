"""layouts.py FILE LAYOUT: trains a small network in float64 in a layout, and keeps the losses.

FILE also gets those of the plain model, computed alone on the same device.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd

STEPS, BATCH, SIDE = 4, 8, 16


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    ).double()


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(BATCH, 3, SIDE, SIDE, generator=generator, dtype=torch.float64).to(device),
            torch.randint(5, (BATCH,), generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]


def plain(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    path, text = sys.argv[1:]
    run = fd.init(timeout=100)
    data = batches(run.device)
    expected = plain(network().to(run.device), data)
    trainer = run.trainer(
        network().to(run.device),
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        layout=text,
        sample=data[0][0],
    )
    found = [trainer.step(x, y).item() for x, y in data]
    run.print(f"{text}: {found}")
    if run.rank == 0:
        np.savez(path, plain=np.array(expected), found=np.array(found))


main()

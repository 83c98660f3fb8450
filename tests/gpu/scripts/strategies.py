"""strategies.py FILE STRATEGY…: trains a small model in float64 under each, and keeps the weights.

Several hosts are pretended for those that need them. On the CPU and on a GPU it must end alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.sync import parse

STEPS = 24


def model_under(run: fd.Run, text: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)).double().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.distribute(model, optimizer, sync=parse(text))
    return model, optimizer


def batches(run: fd.Run, by_epochs: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(6 * STEPS * run.size, 12, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (len(x),), generator=generator)
    if not by_epochs:  # all models of one run see the same
        yield from zip(
            x.view(-1, 6, 12)[run.rank :: run.size],
            y.view(-1, 6)[run.rank :: run.size],
            strict=True,
        )
        return
    for _ in run.epochs(10):
        yield from run.loader(torch.utils.data.TensorDataset(x[:144], y[:144]), batch_size=6)


def main() -> None:
    path, *texts = sys.argv[1:]
    run = fd.init(timeout=100)
    kept: dict[str, np.ndarray] = {}
    for text in texts:
        model, optimizer = model_under(run, text)
        for x, y in batches(run, by_epochs=text == "daso"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
            loss.backward()
            run.observe_loss(loss.item())
            optimizer.step()
        own = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
        everyones = torch.stack(run.group.all_gather(own))
        kept[text] = everyones.numpy()
        run.print(f"{text}: {everyones.abs().sum():.12f}")
    if run.rank == 0:
        np.savez(path, **kept)


main()

"""compiled.py STRATEGY…: trains a compiled model and the plain one under each.

Prints as JSON, for each: how often Dynamo left its graph, how many graphs there were, and how far
the weights are apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import farandole as fd
from farandole.sync import parse

STEPS = 6


def batches(run: fd.Run, by_epochs: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8 * STEPS * run.size, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (len(x),), generator=generator)
    if by_epochs:
        dataset = torch.utils.data.TensorDataset(x, y)
        for _ in run.epochs(2):
            yield from run.loader(dataset, batch_size=8)
        return
    for first in range(run.rank * 8, len(x), run.size * 8):
        yield x[first : first + 8], y[first : first + 8]


def weights(run: fd.Run, text: str, *, compiled: bool) -> torch.Tensor:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    ).double()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    given = torch.compile(plain, backend="aot_eager") if compiled else plain
    model, _ = run.distribute(given, optimizer, sync=parse(text))
    for x, y in batches(run, by_epochs=text == "daso" and compiled):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.observe_loss(float(loss.detach()))
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in plain.parameters()])


def main() -> None:
    run = fd.init(timeout=100)
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        torch._dynamo.reset()
        counters.clear()
        found = weights(run, text, compiled=True)
        breaks = sum(counters["graph_break"].values())
        graphs = counters["stats"]["unique_graphs"]
        apart = None
        if text != "daso":  # the second model of a run has its epochs behind it
            apart = float((found - weights(run, text, compiled=False)).abs().max())
        if run.rank == 0:
            print(json.dumps([text, breaks, graphs, apart]), flush=True)


main()

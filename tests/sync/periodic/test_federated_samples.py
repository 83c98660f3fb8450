"""Federated averaging counts samples, also those of an epoch's last, shorter batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.sync import Federated
from farandole.testing import run_world
from farandole.train import Run

COUNT, BATCH, SIZE = 17, 5, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def network() -> nn.Linear:
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def train(run: Run) -> torch.Tensor:
    model, source = network(), data()
    wrapped, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.5))
    for x, y in run.loader(source, global_batch_size=BATCH, shuffle=False):
        opt.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        opt.step()
    return model.weight.detach()


def test_a_rank_counts_by_its_samples(tmp_path: Path) -> None:
    shares = Shares(COUNT, SIZE, BATCH)
    x, y = data().tensors
    weights, samples = [], []
    for rank in range(SIZE):
        model = network()
        opt = torch.optim.SGD(model.parameters(), 0.5)
        mine = [list(shares.share(step, rank)) for step in range(shares.steps)]
        for batch in mine:
            opt.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            opt.step()
        weights.append(model.weight.detach())
        samples.append(sum(shares.part(step, rank).samples for step in range(shares.steps)))
    assert len(set(samples)) > 1, "else equal weights would do"
    expected = sum(w * n / COUNT for w, n in zip(weights, samples, strict=True))
    sync = Federated(every=100, fraction=1.0)
    for found in run_world(SIZE, train, folder=tmp_path, sync=sync):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

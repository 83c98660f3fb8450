"""A step of the trainer is a step written by hand, and it tells the strategy the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.sync import AdaComm, Local, Strategy
from farandole.testing import run_world
from farandole.train import Run


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
    )


def network() -> nn.Module:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def by_trainer(run: Run) -> torch.Tensor:
    model, source = network(), data()
    trainer = run.trainer(model, F.cross_entropy, lambda ps: torch.optim.SGD(ps, 0.1))
    for _ in run.epochs(4):
        for x, y in trainer.loader(source, batch_size=4):
            assert not trainer.step(x, y).requires_grad
    return model.weight.detach()


def by_hand(run: Run) -> torch.Tensor:
    model, source = network(), data()
    wrapped, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in run.epochs(4):
        for x, y in run.loader(source, batch_size=4):
            opt.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            run.observe_loss(loss)
            opt.step()
    return model.weight.detach()


@pytest.mark.parametrize("sync", [None, Local(every=3), AdaComm(start=4, steps=4)])
def test_it_is_a_step_by_hand(tmp_path: Path, sync: Strategy | None) -> None:
    ours = run_world(2, by_trainer, folder=tmp_path / "a", sync=sync)
    theirs = run_world(2, by_hand, folder=tmp_path / "b", sync=sync)
    assert torch.equal(ours[0], theirs[0])


def test_it_saves_and_loads(tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        trainer = run.trainer(network(), F.cross_entropy, lambda ps: torch.optim.SGD(ps, 0.1))
        saved = trainer.save(tmp_path / "kept", note=1)
        return trainer.load(saved) == {"note": 1}

    assert run_world(2, body, folder=tmp_path) == [True, True]

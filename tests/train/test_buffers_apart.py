"""Buffers that a model learns by itself, such as a codebook: who keeps them alike, and who says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run


class Codebook(nn.Module):
    """Moves towards what it sees."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("codes", torch.zeros(1))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.learns = learns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.learns:
            self.codes.lerp_(x.detach().mean(0), 0.5)
        return self.norm(self.layer(x + self.codes))


def trained(run: Run, *, learns: bool = True, together: bool = False) -> float:
    model = Codebook(learns=learns)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    source = TensorDataset(torch.arange(16.0).view(16, 1))
    for _ in run.epochs(2):
        for (x,) in run.loader(source, batch_size=2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if together:
            model.codes.copy_(run.mean(model.codes))
    return model.codes.item()


@pytest.mark.parametrize("strategy", ["local:every=2", "server", "hogwild"])
def test_each_rank_has_its_own_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    first, second = run_world(2, trained, folder=tmp_path, sync=parse(strategy))
    said = capsys.readouterr().out
    assert first != second
    assert said.count("note: the buffers 'codes' differ between ranks") == 1
    assert f"Under --sync {parse(strategy)} each rank goes on with its own" in said


def test_the_advice_is_right(tmp_path: Path) -> None:
    first, second = run_world(
        2, lambda run: trained(run, together=True), folder=tmp_path, sync=parse("local:every=2")
    )
    assert first == second != 0.0


@pytest.mark.parametrize(
    ("strategy", "learns"), [("allreduce", True), ("lagged", True), ("local:every=2", False)]
)
def test_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str, learns: bool
) -> None:
    run_world(2, lambda run: trained(run, learns=learns), folder=tmp_path, sync=parse(strategy))
    assert "differ between ranks" not in capsys.readouterr().out

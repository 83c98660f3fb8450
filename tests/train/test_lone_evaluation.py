"""A script that evaluates on one rank, as those for DDP do, reads that rank's share alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farandole.testing import run_world
from farandole.train import Run

TEST = TensorDataset(torch.ones(8, 2))


def trained(run: Run, *, everywhere: bool, by_torch: bool = False) -> int:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    count = 0
    for _ in run.epochs(3):
        for (x,) in run.loader(TEST, batch_size=2):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        if everywhere or run.rank == 0:
            with torch.no_grad():
                source = DataLoader(TEST) if by_torch else run.loader(TEST, batch_size=4)
                count = sum(len(x) for (x,) in source)
    return count


def test_it_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_world(2, lambda run: trained(run, everywhere=False), folder=tmp_path)[0] == 4
    said = capsys.readouterr().out
    assert said.count("note: rank 0 has evaluated 1 times on batches of run.loader, rank 1 0") == 1


@pytest.mark.parametrize(
    ("everywhere", "by_torch", "counts"),
    [
        (True, False, [4, 4]),
        (False, True, [8, 0]),
    ],
)
def test_nothing_to_say(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    everywhere: bool,
    by_torch: bool,
    counts: list[int],
) -> None:
    found = run_world(
        2, lambda run: trained(run, everywhere=everywhere, by_torch=by_torch), folder=tmp_path
    )
    assert found == counts
    assert "has evaluated" not in capsys.readouterr().out

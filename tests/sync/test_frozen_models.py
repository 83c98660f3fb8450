"""A model that is wholly frozen when it is distributed, such as a teacher, and thawed later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.sync import parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run


def body(run: Run) -> list[float]:
    teacher, student = nn.Linear(3, 2), nn.Linear(2, 1)
    with torch.no_grad():
        teacher.weight.fill_(0.5)
        student.weight.fill_(0.3)
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    run.distribute(student, optimizer)
    run.distribute(teacher)
    source = TensorDataset(torch.arange(24.0).view(8, 3))
    for epoch in run.epochs(4):
        if epoch == 2:
            teacher.requires_grad_(True)
            optimizer.add_param_group({"params": list(teacher.parameters())})
        for (x,) in run.loader(source, batch_size=2):
            optimizer.zero_grad()
            loss = (student(teacher(x)) / 100).sum()
            loss.backward()
            run.observe_loss(loss)
            optimizer.step()
    return teacher.weight.flatten().tolist()


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce:codec=fp16", "daso"])
def test_it_stays_the_same_on_all_ranks(tmp_path: Path, strategy: str) -> None:
    hosts = Topology.declared([1, 1])
    first, second = run_world(2, body, folder=tmp_path, sync=parse(strategy), topology=hosts)
    assert first == second
    assert first != [0.5] * 6

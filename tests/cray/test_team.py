"""Teams average gradients: at once, or one step late, and each gradient exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.cray.team import Team, TeamOptions
from farandole.cray.values import gradients_of
from farandole.testing import run_world
from farandole.train.run import Run


def given(rank: int, step: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), 10.0 * step + rank), torch.full((4,), 1.0 * rank).double()]


def mean(step: int) -> float:
    return 10.0 * step + 0.5


def applied(run: Run, options: TeamOptions, steps: int) -> list[float]:
    team = Team(0, run.group)
    team.options = options
    found = []
    for step in range(steps):
        gradients = given(run.rank, step)
        team.average(gradients)
        assert len(set(gradients[0].flatten().tolist())) == 1
        found.append(float(gradients[0][0, 0]))
    assert team.statistics.steps == steps
    assert team.statistics.bytes == steps * (6 * 4 + 4 * 8)
    team.require_applied()
    return found


def test_gradients_are_averaged(tmp_path: Path) -> None:
    found = run_world(2, lambda run: applied(run, TeamOptions(), 3), folder=tmp_path)
    assert found == [[mean(0), mean(1), mean(2)]] * 2


def test_pipelined_steps_apply_each_gradient_once(tmp_path: Path) -> None:
    options = TeamOptions(synchronous_first=2, synchronous_from=5)
    found = run_world(2, lambda run: applied(run, options, 7), folder=tmp_path)
    expected = [mean(0), mean(1), 0.0, mean(2), mean(3), mean(4) + mean(5), mean(6)]
    assert found == [expected] * 2


def test_averages_that_were_never_applied_are_named(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        with pytest.raises(fd.UserError, match="not applied"):
            applied(run, TeamOptions(synchronous_first=0), 2)

    run_world(2, body, folder=tmp_path)


def test_what_has_no_gradient_is_named() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(fd.UserError, match="'weight' has no gradient"):
        gradients_of(model)
    with pytest.raises(fd.UserError, match="gradient 1 is None"):
        gradients_of([torch.zeros(1), None])
    with pytest.raises(fd.UserError, match="synchronous_first=-1"):
        TeamOptions(synchronous_first=-1)

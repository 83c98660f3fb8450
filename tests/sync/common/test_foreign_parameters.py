"""What run.distribute is given, and what an optimizer steps besides: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farandole.errors import UserError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run

NOT_A_MODEL = "wants a model, a torch.nn.Module, and was given"
NOT_AN_OPTIMIZER = "wants a torch.optim.Optimizer with its hooks, and was given a"


class Balance(nn.Module):
    """A loss with a weight that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return torch.exp(-self.scale[0]) * output.square().mean() + self.scale.sum()


def train(run: Run, *, distributes_the_loss: bool) -> list[float]:
    model, balance = nn.Linear(3, 2), Balance()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.1)
    optimizer = torch.optim.SGD([*model.parameters(), *balance.parameters()], 0.1)
    run.distribute(model, optimizer)
    if distributes_the_loss:
        run.distribute(balance)
    for step in range(3):
        optimizer.zero_grad()
        balance(model(torch.full((4, 3), float(run.rank + step)))).backward()
        optimizer.step()
    return balance.scale.tolist()


@pytest.mark.parametrize("strategy", ["allreduce", "lagged", "local:every=2", "postlocal:at=0.5"])
def test_parameters_of_no_distributed_model_are_refused(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> str:
        with pytest.raises(UserError) as raised:
            train(run, distributes_the_loss=False)
        return str(raised.value)

    found = run_world(2, body, folder=tmp_path, sync=parse(strategy))
    assert found[0] == found[1]
    assert "steps 1 parameter(s) of no distributed model (of shape (2,))" in found[0]
    assert "Give the nn.Module that holds them to run.distribute too" in found[0]


def test_a_loss_that_is_distributed_too_is_kept_in_step(tmp_path: Path) -> None:
    first, second = run_world(2, lambda run: train(run, distributes_the_loss=True), folder=tmp_path)
    assert first == second
    assert first != [0.0, 0.0]


def test_alone_nothing_is_refused(tmp_path: Path) -> None:
    (scale,) = run_world(1, lambda run: train(run, distributes_the_loss=False), folder=tmp_path)
    assert scale[1] == pytest.approx(-0.3)  # three steps down a slope of 1


def test_what_comes_later_is_looked_at_too(tmp_path: Path) -> None:
    """A parameter that joins the optimizer in mid-training."""

    def body(run: Run) -> None:
        model, late = nn.Linear(3, 2), Balance()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": list(late.parameters())})
        optimizer.step()  # it has no gradient yet
        late(model(torch.ones(4, 3))).backward()
        with pytest.raises(UserError, match="no distributed model"):
            optimizer.step()
        run.distribute(late)
        optimizer.step()

    run_world(2, body, folder=tmp_path)


class Lookahead(torch.optim.Optimizer):
    """As many write it: without the parent's __init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = inner.param_groups, inner.state


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model, inner: ([model, model], None), f"{NOT_A_MODEL} a list"),
        (lambda model, inner: (model.parameters(), None), f"{NOT_A_MODEL} a generator"),
        (lambda model, inner: (None, None), f"{NOT_A_MODEL} None"),
        (lambda model, inner: (model, [inner, inner]), f"{NOT_AN_OPTIMIZER} list"),
        (lambda model, inner: (model, Lookahead(inner)), f"{NOT_AN_OPTIMIZER} Lookahead"),
        (
            lambda model, inner: (model, torch.optim.lr_scheduler.StepLR(inner, 1)),
            f"{NOT_AN_OPTIMIZER} StepLR",
        ),
    ],
)
def test_what_is_no_model_or_no_optimizer(tmp_path: Path, given: Any, said: str) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(UserError, match=said):
            run.distribute(*given(model, torch.optim.SGD(model.parameters(), 0.1)))

    run_world(1, body, folder=tmp_path)

"""What a script does to its parameters besides the optimizer's step: the servers would undo it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import UserError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run

STRATEGIES = [
    "server",
    "server:update=worker",
    "server:staleness=1",
    "server:async,overlap",
    "server:async,update=worker",
    "downpour",
    "downpour:push=2,fetch=3",
]
STEPS = 9


def clips(model: nn.Linear) -> None:
    """As the script of a Wasserstein GAN does it: PyTorch does not count it as a change."""
    model.weight.data.clamp_(-0.01, 0.01)


def loads(model: nn.Linear) -> None:
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def trained(run: Run, touch: Callable[[nn.Linear], None], at: int) -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    source = TensorDataset(torch.ones(2 * run.size * STEPS, 3))
    for number, (x,) in enumerate(run.loader(source, batch_size=2)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if number == at:
            touch(model)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("touch", "at"), [(clips, 2), (loads, 6), (loads, STEPS - 1)])
def test_it_is_refused(
    tmp_path: Path, strategy: str, touch: Callable[[nn.Linear], None], at: int
) -> None:
    with pytest.raises(
        UserError, match="'weight' has been changed outside of the optimizer's step"
    ):
        run_world(2, lambda run: trained(run, touch, at), folder=tmp_path, sync=parse(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_before_the_first_step_weights_can_be_loaded(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        run.distribute(model, optimizer)
        with torch.no_grad():
            model.weight.fill_(7.0)
        for (x,) in run.loader(TensorDataset(torch.zeros(8, 3)), batch_size=2):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return model.weight[0, 0].item()

    assert run_world(2, body, folder=tmp_path, sync=parse(strategy)) == [7.0, 7.0]


def perturbed_and_put_back(run: Run) -> nn.Linear:
    """Sharpness-aware minimization: the gradient is that of a place near by."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    for (x,) in run.loader(TensorDataset(torch.ones(40 * run.size, 3)), batch_size=2):
        model(x).square().mean().backward()
        before = [parameter.data.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * parameter.grad / parameter.grad.norm())
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data = value
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("strategy", ["server", "server:update=worker"])
def test_what_is_put_back_before_the_step_harms_nothing(tmp_path: Path, strategy: str) -> None:
    """All samples are alike, so that any number of workers takes the same steps."""
    (alone,) = run_world(1, perturbed_and_put_back, folder=tmp_path / "alone")
    assert not torch.equal(alone.weight, torch.full((1, 3), 0.5))
    for model in run_world(2, perturbed_and_put_back, folder=tmp_path, sync=parse(strategy)):
        torch.testing.assert_close(model.weight, alone.weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaged_weights_for_an_evaluation(tmp_path: Path, strategy: str) -> None:
    """Behind a pass nothing is on its way from the servers."""

    def body(run: Run) -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run.distribute(model, optimizer)
        source = TensorDataset(torch.ones(2 * run.size * STEPS, 3))
        for _ in run.epochs(3):
            for (x,) in run.loader(source, batch_size=2):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            own = copy.deepcopy(model.state_dict())
            loads(model)
            evaluated = float(model(torch.ones(1, 3)).detach())
            model.load_state_dict(own)
        return evaluated

    assert run_world(2, body, folder=tmp_path, sync=parse(strategy)) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_optimizer_is_refused(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        first = torch.optim.SGD(model[0].parameters(), 0.01)
        second = torch.optim.SGD(model[1].parameters(), 0.01)
        run.distribute(model, first)
        for (x,) in run.loader(TensorDataset(torch.ones(24, 3)), batch_size=2):
            model(x).mean().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad(set_to_none=False)

    with pytest.raises(UserError, match=r"'1\.weight' is trained, and not by the optimizer"):
        run_world(2, body, folder=tmp_path, sync=parse(strategy))

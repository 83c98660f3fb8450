"""What becomes of a script's optimizer on parameter servers: it learns, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from farandole.errors import UserError
from farandole.optim import Lars
from farandole.sync import parse
from farandole.sync.server.downpour_rule import ServerStep, server_step
from farandole.testing import run_world
from farandole.train import Run

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
TRAINED = 1440
MAKERS: dict[str, MakeOptimizer] = {
    "sgd": lambda given: optim.SGD(given, 0.2),
    "adagrad": lambda given: optim.Adagrad(given, 0.02),
    "adam": lambda given: optim.Adam(given, 4e-3),
    "adamw": lambda given: optim.AdamW(given, 4e-3),
    "rmsprop": lambda given: optim.RMSprop(given, 2e-3),
    "nadam": lambda given: optim.NAdam(given, 4e-3),
    "lbfgs": lambda given: optim.LBFGS(given, line_search_fn="strong_wolfe"),
    "lars": lambda given: Lars(given, lr=3.0),
}


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    return images[order], torch.tensor(found.target)[order]


def model() -> nn.Module:
    """Without torch's own generator, which all ranks of a world share."""
    made = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5).mul_(0.3)
    return made


def accuracy_after(make: MakeOptimizer, batch: int, epochs: int) -> Callable[[Run], float]:
    def train(run: Run) -> float:
        images, labels = digits()
        net = model()
        wrapped, optimizer = run.distribute(net, make(net.parameters()))
        data = TensorDataset(images[:TRAINED], labels[:TRAINED])
        for _ in run.epochs(epochs):
            for x, y in run.loader(data, batch_size=batch):

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(wrapped(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        with torch.no_grad():
            return float((net(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean())

    return train


@pytest.mark.parametrize(
    ("sync", "name"),
    [
        ("downpour", "sgd"),
        ("downpour", "adagrad"),
        ("downpour", "adam"),
        ("downpour", "adamw"),
        ("downpour:push=3,fetch=2", "adamw"),
        ("server", "adamw"),
        ("server:async", "adam"),
        ("server:staleness=2", "adagrad"),
        ("server:async,update=worker", "rmsprop"),
        ("server:update=worker", "nadam"),
        ("server:update=worker", "lars"),
    ],
)
def test_it_learns(sync: str, name: str, tmp_path: Path) -> None:
    epochs = 9 if name == "lars" else 4  # it is made for large batches, and takes small steps
    train = accuracy_after(MAKERS[name], batch=24, epochs=epochs)
    found = run_world(2, train, folder=tmp_path, sync=parse(sync))
    assert min(found) > 0.8


def test_lbfgs_learns_where_workers_step(tmp_path: Path) -> None:
    """On all of a rank's data, as it is meant to be used."""
    train = accuracy_after(MAKERS["lbfgs"], batch=TRAINED // 2, epochs=2)
    found = run_world(2, train, folder=tmp_path, sync=parse("server:update=worker"))
    assert min(found) > 0.8


@pytest.mark.parametrize("name", ["rmsprop", "nadam", "lbfgs", "lars"])
@pytest.mark.parametrize(
    ("sync", "instead"),
    [
        ("downpour", "Write --sync server:async,update=worker"),
        ("server", "Write update=worker"),
    ],
)
def test_what_servers_cannot_do_is_refused(
    sync: str, instead: str, name: str, tmp_path: Path
) -> None:
    train = accuracy_after(MAKERS[name], batch=24, epochs=1)
    kind = type(MAKERS[name](model().parameters())).__qualname__
    with pytest.raises(UserError, match=rf"no rule for [\w.]*{kind}\. .*AdamW, SGD.* {instead}"):
        run_world(2, train, folder=tmp_path, sync=parse(sync))


def step_of(optimizer: Optimizer, **more: Any) -> ServerStep:
    (settings,) = optimizer.param_groups
    return server_step(settings, optimizer, **{"push": 1, "workers": 4, **more})


@pytest.mark.parametrize(
    ("kind", "options", "push", "rule", "gain"),
    [
        (optim.SGD, {}, 2, "adagrad", 0.1),
        (optim.SGD, {"momentum": 0.9}, 1, "adagrad", 0.1),  # which only the workers have
        (optim.SGD, {"weight_decay": 0.01}, 3, "adagrad:weight_decay=0.03", 0.1),
        (optim.SGD, {"maximize": True}, 1, "adagrad:maximize", 0.1),
        (optim.Adagrad, {"eps": 1e-6}, 8, "adagrad:eps=1e-06", 1.0),
        (optim.Adagrad, {"weight_decay": 0.1}, 2, "adagrad:weight_decay=0.2", 1.0),
        (optim.Adam, {"betas": (0.8, 0.9)}, 1, "adam:beta1=0.8,beta2=0.9", 0.25),
        (optim.Adam, {"weight_decay": 0.1}, 2, "adam:weight_decay=0.2", 0.5),
        (optim.AdamW, {"weight_decay": 0.1}, 2, "adamw:weight_decay=0.1", 0.5),
        (optim.AdamW, {}, 8, "adamw", 1.0),
    ],
)
def test_the_rule_that_suits_the_optimizer(
    kind: Any, options: dict[str, Any], push: int, rule: str, gain: float
) -> None:
    optimizer = kind(model().parameters(), lr=0.1, **options)
    assert step_of(optimizer, push=push) == ServerStep(rule, gain)
    assert step_of(optimizer, push=push, gain=0.7) == ServerStep(rule, 0.7)


def test_going_up_goes_up(tmp_path: Path) -> None:
    def climb(run: Run) -> float:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        wrapped, optimizer = run.distribute(net, optim.SGD(net.parameters(), lr=0.1, maximize=True))
        for (x,) in run.loader(TensorDataset(torch.ones(8, 1)), batch_size=1):
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
        return float(net.weight.detach())

    assert min(run_world(2, climb, folder=tmp_path, sync=parse("downpour"))) > 0

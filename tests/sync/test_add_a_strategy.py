"""Adding a strategy: one class, registered, is found by name and trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import farandole as fd
from farandole.cli.options import sync_option
from farandole.comm import Group
from farandole.errors import UserError
from farandole.sync import STRATEGIES, AllReduce, Strategy, Synchronizer, parse, register
from farandole.sync.base import require_at_least, require_optimizer
from farandole.testing import run_world
from farandole.train import Run


@dataclasses.dataclass(frozen=True)
class Plain(Strategy):
    """Averages gradients one by one before each step, and sends them `times` times."""

    name: ClassVar[str] = "plain"

    times: int = 1

    def __post_init__(self) -> None:
        require_at_least(self, "times", 1)

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        group.broadcast_all([*model.parameters(), *model.buffers()])

        def average(*_: Any) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                for _ in range(self.times):
                    group.all_reduce(parameter.grad, "average")

        require_optimizer(self, optimizer).register_step_pre_hook(average)
        return Synchronizer(model)


@pytest.fixture
def plain() -> Iterator[type[Plain]]:
    yield register(Plain)
    STRATEGIES.remove("plain")


def train(run: Run, **options: Any) -> torch.Tensor:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.full((1, 3), float(run.rank)))  # all begin with rank 0's
        model.bias.zero_()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = run.distribute(model, opt, **options)
    generator = torch.Generator().manual_seed(run.rank)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        opt.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_it_has_a_text_form(plain: type[Plain]) -> None:
    assert parse("plain") == Plain()
    assert parse("plain:times=2") == Plain(times=2)
    assert str(Plain(times=2)) == "plain:times=2"
    with pytest.raises(UserError, match="plain: times=0 must be at least 1"):
        parse("plain:times=0")
    with pytest.raises(UserError, match=r"there is no strategy 'plane'\. .*'plain'"):
        parse("plane")


def test_help_lists_it(plain: type[Plain]) -> None:
    @click.command()
    @sync_option()
    def command() -> None: ...

    (option,) = command.params
    assert isinstance(option, click.Option)
    assert ", plain; " in str(option.help)


def test_it_trains_by_its_text_and_as_an_object(plain: type[Plain], tmp_path: Path) -> None:
    expected = run_world(2, train, folder=tmp_path, sync=AllReduce())
    by_text = run_world(2, train, folder=tmp_path, sync=parse("plain:times=2"))
    as_object = run_world(2, lambda run: train(run, sync=Plain()), folder=tmp_path)
    for found in (*by_text, *as_object):
        torch.testing.assert_close(found, expected[0])


def test_a_name_is_taken_once(plain: type[Plain]) -> None:
    assert register(Plain) is Plain  # again: as if a module was imported twice

    class Other(Plain):
        pass

    with pytest.raises(UserError, match="there is already a strategy 'plain'"):
        register(Other)


def test_strategies_that_come_with_farandole_are_found_without_a_list_of_their_own() -> None:
    assert all(getattr(fd, kind.__name__) is kind for kind in STRATEGIES.values())

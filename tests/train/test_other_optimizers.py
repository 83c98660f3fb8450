"""Optimizers of a distributed model that a checkpoint has no state of: the user is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from farandole.testing import run_world
from farandole.train import Run

if TYPE_CHECKING:
    from conftest import Sandbox

TOLD = "trains parameters of a distributed model, was not given to run.distribute"

COMPILED = """
import torch
import farandole as fd
run = fd.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
run.distribute(model)
before = model.weight.detach().clone()
step = torch.compile(optimizer.step, backend="eager")
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    step()
run.save()
print("has moved" if not torch.equal(model.weight, before) else "has not")
"""


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def saved(
    run: Run,
    make_second: Callable[[nn.Module], Optimizer],
    state: Callable[[Optimizer], dict[str, Any]] = lambda second: {},
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    first, second = adam(model[0]), make_second(model[1])
    run.distribute(model, first)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        first.step()
        second.step()
    run.save(**state(second))
    run.save(**state(second))


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_optimizer_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    run_world(size, lambda run: saved(run, adam), folder=tmp_path)
    assert capsys.readouterr().out.count(f"note: Adam {TOLD}") == 1


def test_a_model_that_was_distributed_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        run.distribute(model)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        run.save()

    run_world(2, body, folder=tmp_path)
    assert f"note: AdamW {TOLD}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make_second", "state"),
    [
        (adam, lambda second: {"other": second.state_dict()}),
        (adam, lambda second: {"all": {"optimizers": [second.state_dict()]}}),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), lambda second: {}),  # has no state
        (lambda model: adam(nn.Linear(2, 2)), lambda second: {}),  # of another model
    ],
)
def test_nothing_to_tell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_second: Callable[[nn.Module], Optimizer],
    state: Callable[[Optimizer], dict[str, Any]],
) -> None:
    run_world(2, lambda run: saved(run, make_second, state), folder=tmp_path)
    assert TOLD not in capsys.readouterr().out


def test_one_that_is_given_with_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It steps before that."""

    def body(run: Run) -> None:
        encoder, head = nn.Linear(3, 2), nn.Linear(2, 1)
        optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
        run.distribute(encoder)
        encoder(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        run.distribute(head, optimizer)
        run.save()

    run_world(2, body, folder=tmp_path)
    assert TOLD not in capsys.readouterr().out


class Lookahead(torch.optim.Optimizer):
    """As in timm: shares what the inner optimizer has."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self._inner = inner
        self._share()

    def _share(self) -> None:
        self.state, self.param_groups = self._inner.state, self._inner.param_groups

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)


def test_one_inside_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(3, 1)
        optimizer = Lookahead(adam(model))
        run.distribute(model, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        run.save()

    run_world(2, body, folder=tmp_path)
    assert TOLD not in capsys.readouterr().out


def test_one_hook_serves_all_runs(tmp_path: Path) -> None:
    """To add hooks while another thread takes a step would break that step."""
    run_world(2, lambda run: saved(run, adam), folder=tmp_path / "first")
    before = dict(_global_optimizer_post_hooks)
    run_world(3, lambda run: saved(run, adam), folder=tmp_path / "second")
    assert dict(_global_optimizer_post_hooks) == before


def test_a_compiled_step(sandbox: Sandbox) -> None:
    done = sandbox.python(sandbox.script("compiled.py", COMPILED))
    assert f"note: Adam {TOLD}" in done.stdout, done.stderr
    assert "has moved" in done.stdout

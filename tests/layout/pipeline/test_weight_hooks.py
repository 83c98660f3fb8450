"""Hooks on weights, and functions of weights alone, see the gradient of the whole step.

All of them clip, so that two parts clipped apart are not the whole clipped. The self-check is off.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import parametrize

from farandole import InexactError, StageError
from farandole.layout import parse_layout
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import sgd

LIMIT = 1e-3
LAYOUTS = (
    "tiles=2x1",
    "tiles=2x1,in_turn",
    "channels=2",
    "stages=2,microbatches=2",
    "stages=2,microbatches=2,schedule=gems",
    "stages=2,microbatches=2,schedule=zero-bubble",
    "stages=2,microbatches=2,recompute",
    "tiles=2x1,stages=2,microbatches=2",
)


class Clipped(torch.autograd.Function):
    """The same value, with a clipped gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-LIMIT, LIMIT)


class ClippedWeight(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return Clipped.apply(weight)


def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        ).double()


def clip_in_hooks(built: nn.Module) -> None:
    for weight in built.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))


def clip_afterwards(built: nn.Module) -> None:
    def clip(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-LIMIT, LIMIT)

    for weight in built.parameters():
        weight.register_post_accumulate_grad_hook(clip)


def clip_in_functions(built: nn.Module) -> None:
    assert isinstance(built, nn.Sequential)
    for at in (0, 5):
        parametrize.register_parametrization(built[at], "weight", ClippedWeight())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randn(4, 3, generator=generator, dtype=torch.float64),
        )
        for _ in range(2)
    ]


def plainly(prepare: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    built = model()
    prepare(built)
    optimizer = sgd(built.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(built(x), y).backward()
        optimizer.step()
    return {name: each.detach() for name, each in built.named_parameters()}


def trained(
    prepare: Callable[[nn.Module], None],
    layout: str,
    folder: Path,
    replicas: int = 1,
    after: Callable[[nn.Module], None] = lambda built: None,
) -> dict[str, Tensor]:
    """What the ranks hold, together."""
    size = parse_layout(layout).ranks * replicas
    models = [model() for _ in range(size)]
    for built in models:
        prepare(built)

    def body(run: Run) -> dict[str, Tensor]:
        built = models[run.rank]
        trainer = run.trainer(built, F.mse_loss, sgd, layout=layout, check=False)
        after(built)
        for x, y in batches():
            rows = len(x) // replicas
            mine = slice(rows * (run.rank * replicas // size), None)
            trainer.step(x[mine][:rows], y[mine][:rows])
        return {
            name: each.detach().clone() for name, each in built.named_parameters() if each.numel()
        }

    found = run_world(size, body, folder=folder)
    return {name: each for rank in found for name, each in rank.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_see_the_gradient_of_the_step(layout: str, tmp_path: Path) -> None:
    expected = plainly(clip_in_hooks)
    assert not torch.allclose(expected["0.weight"], plainly(lambda built: None)["0.weight"])
    assert_close(trained(clip_in_hooks, layout, tmp_path), expected)


@pytest.mark.parametrize("layout", ["tiles=2x1", "stages=2,microbatches=2,schedule=gems"])
def test_hooks_after_accumulation(layout: str, tmp_path: Path) -> None:
    assert_close(trained(clip_afterwards, layout, tmp_path), plainly(clip_afterwards))


def test_hooks_set_after_the_trainer_was_made(tmp_path: Path) -> None:
    """And one that is taken away again."""

    def later(built: nn.Module) -> None:
        clip_in_hooks(built)
        first = next(built.parameters())
        first.register_hook(lambda gradient: gradient * 100).remove()

    found = trained(lambda built: None, "stages=2,microbatches=2", tmp_path, after=later)
    assert_close(found, plainly(clip_in_hooks))


def test_hooks_see_the_gradient_of_all_replicas(tmp_path: Path) -> None:
    found = trained(clip_in_hooks, "stages=2,microbatches=2", tmp_path, replicas=2)
    assert_close(found, plainly(clip_in_hooks))


@pytest.mark.parametrize("layout", ["tiles=2x1", "tiles=2x1,in_turn", "channels=2", "stages=2"])
def test_functions_of_weights_alone(layout: str, tmp_path: Path) -> None:
    expected = plainly(clip_in_functions)
    assert_close(trained(clip_in_functions, layout, tmp_path), expected)


class SetsHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.layer.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("layout", ["tiles=2x1", "stages=2,microbatches=2"])
def test_a_hook_that_forward_sets_is_refused(layout: str, tmp_path: Path) -> None:
    def body(run: Run) -> None:
        built = nn.Sequential(SetsHook(), nn.Flatten(), nn.Linear(72, 3)).double()
        trainer = run.trainer(built, F.mse_loss, sgd, layout=layout, check=False)
        trainer.step(*batches()[0])

    with pytest.raises((InexactError, StageError), match=r"sets a hook .* on the weight '0.layer"):
        run_world(2, body, folder=tmp_path)


def test_a_hook_of_several_weights_needs_all_of_them(tmp_path: Path) -> None:
    seen: list[int] = []

    def together(built: nn.Module) -> None:
        weights = list(built.parameters())
        register_multi_grad_hook(weights, lambda gradients: seen.append(len(gradients)))

    trained(together, "tiles=2x1", tmp_path / "tiles")
    assert seen == [8, 8, 8, 8]  # two steps on two ranks
    with pytest.raises((InexactError, StageError), match="register_multi_grad_hook"):
        trained(together, "stages=2", tmp_path / "stages")

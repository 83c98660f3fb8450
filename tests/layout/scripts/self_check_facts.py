"""self_check_facts.py FOLDER: what the self-check says of models, layout by layout.

Writes FOLDER/<rank>.json: for each case "trained", or the error that came instead, and whether a
check changes anything about what is trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.layout import parse_layout
from farandole.train.settings import Settings

LAYOUTS = {
    "stages": "stages=2,microbatches=2",
    "tiles": "tiles=2x1",
    "gems": "stages=2,microbatches=4,schedule=gems",
}
Inside = Callable[["Net", torch.Tensor], torch.Tensor]


class Reversed(torch.autograd.Function):
    """Gradient reversal, of domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Net(nn.Module):
    """A small CNN; `inside` is what somebody wrote into the middle of its forward."""

    def __init__(self, inside: Inside, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 5)
        self.register_buffer("average", torch.zeros(4))
        self.temperature = 1.0
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(self, F.relu(self.norm(self.first(x))))
        result: torch.Tensor = self.head(self.drop(F.relu(self.second(x))).mean((2, 3)))
        return result


def nothing(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x


def custom_function(net: Net, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Reversed.apply(x)
    return result


def named_axis(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * x.mean(axis=1, keepdim=True)


def hook(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: gradient * 2)
    return x


def moving_average(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)))
    return x


def attribute(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.temperature *= 0.9
    return x * net.temperature


def deviation(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x / (x.std() + 1)


def largest(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().max()


def picked(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * x[x > 0].mean()


def weight_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * net.second.weight.view(4, -1).std(1).mean()


def by_type(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Somebody who looks at what a layout passes off as a tensor."""
    return x * 2 if type(x) is torch.Tensor else x


CASES: tuple[Inside, ...] = (
    nothing,
    custom_function,
    named_axis,
    hook,
    moving_average,
    attribute,
    deviation,
    largest,
    picked,
    weight_view,
    by_type,
)


def runs(run: fd.Run) -> fd.Run:
    """Another run over the same group: a run with a layout has one model."""
    settings = Settings(name="other", folder=run.folder, script="facts")
    return fd.Run(run.group, run.topology, run.device, settings=settings, seed=3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8) % 5


def trained(run: fd.Run, layout: str | None, inside: Inside, dropout: float, check: bool) -> Any:
    torch.manual_seed(0)
    one = runs(run)
    trainer = one.trainer(
        Net(inside, dropout),
        F.cross_entropy,
        lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
        layout=None if layout is None else parse_layout(layout),
        check=check,
    )
    x, y = batch()
    losses = [float(trainer.step(x, y)) for _ in range(2)]
    return losses, trainer.predict(x).sum().item()


def main() -> None:
    run = fd.init()
    cases: dict[str, Any] = {}
    for inside in CASES:
        for name, layout in LAYOUTS.items():
            cases[f"{inside.__name__} {name}"] = came_of(run, layout, inside, check=True)
    undisturbed = {}
    for name, layout in LAYOUTS.items():
        checked = trained(run, layout, nothing, 0.5, check=True)
        undisturbed[name] = checked == trained(run, layout, nothing, 0.5, check=False)
    unchecked = came_of(run, LAYOUTS["tiles"], by_type, check=False)
    came_of(run, LAYOUTS["tiles"], nothing, check=True)  # once more: it is known
    found = {"cases": cases, "undisturbed": undisturbed, "unchecked": unchecked}
    (Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps(found))


def came_of(run: fd.Run, layout: str, inside: Inside, *, check: bool) -> list[Any]:
    try:
        return ["trained", trained(run, layout, inside, 0.0, check=check)]
    except fd.FarandoleError as error:
        return [type(error).__name__, str(error)]


if __name__ == "__main__":
    main()

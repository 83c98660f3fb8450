"""Small models, a plain loop, and the same loop in stages: what the tests of pipelines share.

The ranks of an in-process world are threads, and torch has one random state for all of them. So
models and batches are made here, outside of the world, from generators of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole import Layout
from farandole.layout import parse_layout
from farandole.layout.arguments import arguments_of, call
from farandole.layout.partition.blocks import blocks_of
from farandole.layout.partition.stage_module import StageModule
from farandole.sync import Strategy
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from farandole.train.trainer import Trainer

TOLERANCE = 1e-10
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]
Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]


class Wide(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Skipping(nn.Module):
    """Skip connections from the input and from the first layer, over several cuts."""

    cuts = ("second", "third", "fourth")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x).tanh()
        middle = self.second(early).tanh()
        return self.fourth(self.third(middle + x).tanh() + early)


class Fork(nn.Module):
    """One value in, two out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).tanh(), self.right(x).tanh()


class Cross(nn.Module):
    """Two values in, two out; one of them as it came, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, both: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"right": both[1], "left": self.layer(both[0]).tanh()}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, both: Mapping[str, Tensor]) -> Tensor:
        return self.layer(torch.cat([both["left"], both["right"]], 1))


class Mark(nn.Module):
    """Sends along which rows are large, as whole numbers and as yes or no, and plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.layer(x).tanh(), (x.sum(1) > 0).long(), x[:, :1] > 0, 2


class Marked(nn.Module):
    """Uses the marks and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor, Tensor, int]) -> Any:
        x, large, positive, times = value
        return self.layer(x * times).tanh() * large[:, None] + x * positive, large, positive, times


class Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return self.layer(value[0])


class Twice(nn.Module):
    """Two square layers; with the same two in the other order, they are tied crosswise."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class Task(NamedTuple):
    """A model and what it learns: `inputs` and `targets` draw so many rows."""

    model: nn.Module
    inputs: Callable[[int, torch.Generator], Any]
    targets: Callable[[int, torch.Generator], Any]
    loss: Loss
    summed: Loss  # the same, as a sum over the rows

    def batches(self, rows: Sequence[int], seed: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [(self.inputs(count, generator), self.targets(count, generator)) for count in rows]

    def loss_for(self, layout: Layout) -> Loss:
        return self.loss if layout.reduction == "mean" else self.summed


def drawn(model: nn.Module, seed: int = 5) -> nn.Module:
    """With weights from a generator of their own, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return model


def normal(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda rows, generator: torch.randn(
        rows, *shape, generator=generator, dtype=torch.float64
    )


def whole_numbers(below: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda rows, generator: torch.randint(below, (rows,), generator=generator)


def _regression(model: nn.Module, outputs: int = 3, inputs: Any = None) -> Task:
    return Task(
        drawn(model),
        inputs or normal(4),
        normal(outputs),
        F.mse_loss,
        lambda found, wanted: F.mse_loss(found, wanted, reduction="sum"),
    )


def _classification(model: nn.Module, inputs: Any, classes: int) -> Task:
    return Task(
        drawn(model),
        inputs,
        whole_numbers(classes),
        F.cross_entropy,
        lambda found, wanted: F.cross_entropy(found, wanted, reduction="sum"),
    )


def task(name: str) -> Task:
    """A fresh one. Each has at least four blocks."""
    if name == "mlp":
        layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 3))
        return _regression(nn.Sequential(*layers))
    if name == "cnn":
        layers = (
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 3, 3, stride=2, groups=3),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(3, 4),
        )
        return _classification(nn.Sequential(*layers), normal(2, 5, 5), 4)
    if name == "residual":
        body = nn.Sequential(nn.Linear(4, 5), *(Wide(5) for _ in range(4)), nn.Linear(5, 3))
        return _regression(body)
    if name == "skipping":
        return _regression(Skipping())
    if name == "tied":
        model = nn.Sequential(
            nn.Embedding(6, 4), Wide(4), Wide(4), Wide(4), nn.Linear(4, 6, bias=False)
        )
        model[4].weight = model[0].weight
        return _classification(model, whole_numbers(6), 6)
    if name == "tied crosswise":
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.Sequential(Twice(first, second), Wide(4), Twice(second, first), nn.Linear(4, 3))
        return _regression(model)
    if name == "reused":
        twice = Wide(4)
        return _regression(nn.Sequential(nn.Linear(4, 4), twice, nn.Tanh(), twice, nn.Linear(4, 3)))
    if name == "tuples":
        return _regression(nn.Sequential(Fork(), Cross(), Join(), nn.Tanh(), nn.Linear(4, 3)))
    assert name == "masked", name
    return _regression(nn.Sequential(Mark(), Marked(), Marked(), Pick()))


TASKS = (
    "mlp",
    "cnn",
    "residual",
    "skipping",
    "tied",
    "tied crosswise",
    "reused",
    "tuples",
    "masked",
)


def blocks(model: nn.Module) -> nn.Module | list[nn.Module]:
    """What a trainer is given. Tracing is not for threads, so it is done before they start."""
    if isinstance(model, nn.Sequential):
        return model
    return [block.module for block in blocks_of(model)]


def dropping() -> nn.Module:
    """With dropout in two places."""
    layers = [nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5)]
    return drawn(nn.Sequential(*layers, nn.Linear(8, 3)))


def draw_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For models that draw: as threads ranks have one random state, as processes one each."""
    lock, drawing = threading.Lock(), StageModule._drawing

    def locked(self: StageModule, *arguments: Any) -> Any:
        with lock:
            return drawing(self, *arguments)

    monkeypatch.setattr(StageModule, "_drawing", locked)


class Outcome(NamedTuple):
    """What a rank has after some steps, by the names in the whole model."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]  # of each step, as the optimizer got them
    weights: dict[str, Tensor]
    prediction: Any


class Recorder:
    """The gradients that an optimizer is given."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        optimizer.register_step_pre_hook(self._record)

    def _record(self, optimizer: Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.steps.append(
            {
                self._names[id(weight)]: weight.grad.clone()
                for weight in weights
                if weight.grad is not None and id(weight) in self._names
            }
        )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds; what it does not hold is empty."""
    return {name: value.clone() for name, value in model.state_dict().items() if value.numel()}


def sgd(weights: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(weights, 0.01, momentum=0.9)


def adamw(weights: Iterator[nn.Parameter]) -> Optimizer:
    # With its usual eps it would blow up the rounding errors of a gradient that is nearly zero.
    return torch.optim.AdamW(weights, 0.02, eps=1e-4)


def plainly(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    make_optimizer: MakeOptimizer = sgd,
    clip: float | None = None,
) -> Outcome:
    """The loop that everybody writes. Trains a copy."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    recorder = Recorder(model, optimizer)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(call(model, arguments_of(x)), y)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
    model.eval()
    with torch.no_grad():
        prediction = call(model, arguments_of(batches[-1][0]))
    return Outcome(losses, recorder.steps, tensors_of(model), prediction)


def in_stages(
    layout: Layout | str | None,
    model: nn.Module,
    body: Callable[[Run, Trainer, nn.Module], Any],
    loss: Loss,
    folder: Path,
    make_optimizer: MakeOptimizer = sgd,
    *,
    size: int | None = None,
    sync: Strategy | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> list[Any]:
    """Calls `body` on every rank, with a trainer and the model that it has taken apart.

    `topology`: hosts that the ranks are said to sit on.
    """
    if isinstance(layout, str):
        layout = parse_layout(layout)
    size = size or (1 if layout is None else layout.ranks)
    models = [copy.deepcopy(model) for _ in range(size)]
    given = [blocks(each) for each in models]

    def work(run: Run) -> Any:
        if topology is not None:
            run._session.settings = dataclasses.replace(run.settings, pretend_hosts="declared")
        trainer = run.trainer(
            given[run.rank], loss, make_optimizer, layout=layout, sync=sync, **options
        )
        return body(run, trainer, models[run.rank])

    return run_world(size, work, folder=folder, topology=topology)


def trained_in_stages(
    layout: Layout,
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    folder: Path,
    make_optimizer: MakeOptimizer = sgd,
    **options: Any,
) -> list[Outcome]:
    """As `plainly`, by rank."""

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Outcome:
        recorder = Recorder(model, trainer.optimizer)
        losses = [trainer.step(x, y).item() for x, y in batches]
        prediction = trainer.predict(batches[-1][0])
        return Outcome(losses, recorder.steps, tensors_of(model), prediction)

    return in_stages(layout, model, body, loss, folder, make_optimizer, **options)


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(
        found, expected, rtol=0, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


def assert_same(ranks: Sequence[Outcome], expected: Outcome) -> None:
    """All ranks together hold the whole model, and it is the expected one."""
    assert {name for found in ranks for name in found.weights} == set(expected.weights)
    for rank, found in enumerate(ranks):
        assert_close(found.losses, expected.losses, f"losses of rank {rank}")
        assert_weights(found.weights, expected.weights, f"rank {rank}")
        for step, (ours, theirs) in enumerate(
            zip(found.gradients, expected.gradients, strict=True)
        ):
            assert_weights(ours, theirs, f"gradient of step {step} on rank {rank}")
        assert_close(found.prediction, expected.prediction, f"prediction of rank {rank}")


def assert_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Of those that are found."""
    for name, value in found.items():
        assert_close(value, expected[name], f"{what}, {name}")

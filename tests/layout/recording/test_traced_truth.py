"""Whatever a model's forward does, its stages train what the plain model trains, or refuse by name.

Each construct stands once in a submodule and once in the model's own forward. The self-check is
off: what is refused here is refused by who cuts the model, and before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from farandole import InexactError, StageError, UserError
from farandole.layout.partition.blocks import blocks_of
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import (
    Batch,
    Outcome,
    Recorder,
    assert_same,
    drawn,
    normal,
    plainly,
    sgd,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WIDTH = 4
SCALE = 1.5
TABLE = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)
FACTORS = [1.0, 2.0]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.strength * gradients[0], None


class Both(torch.autograd.Function):
    """Two results, and what it keeps in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 2 * gradients[0] * y + gradients[1], gradients[0] * x


backwards = Reversed.apply  # bound before anybody looks


class Part(nn.Module):
    """A layer, buffers, and attributes; `told` is its forward."""

    def __init__(self, told: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.told = told
        self.calls = 0
        self.kept: list[Any] = []
        self.temperature = 1.0
        self.options = {"scale": 2.0}
        self.table = torch.linspace(1, 2, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self, x)


class Inside(nn.Module):
    """The part between two layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(3, WIDTH), part, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x).tanh()))


class Own(Part):
    """The same in the model's own forward."""

    def __init__(self, told: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(told)
        self.before, self.after = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.told(self, self.before(x).tanh()))


def reversal(self: Any, x: Tensor) -> Tensor:
    return self.other(backwards(self.layer(x), 0.5))


def two_results(self: Any, x: Tensor) -> Tensor:
    one, two = Both.apply(self.layer(x), self.other(x))
    return one + two.tanh()


def running_average(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return self.other(y / self.average)


def average_without_gradients(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    with torch.no_grad():
        self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return self.other(y / self.average)


def counting_buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.other(self.layer(x) / self.count)


def new_buffer(self: Any, x: Tensor) -> Tensor:
    self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
    return self.other(self.layer(x) + self.average)


def part_of_buffer(self: Any, x: Tensor) -> Tensor:
    self.average[0] = x.detach().mean()
    torch.mul(self.average[1:], 1.1, out=self.average[1:])
    return self.other(self.layer(x) + self.average)


def clamped_weight(self: Any, x: Tensor) -> Tensor:
    self.gain.data.clamp_(0.2, 0.9)
    return self.other(self.layer(x) * self.gain)


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.other(self.layer(x) / self.calls)


def cooling(self: Any, x: Tensor) -> Tensor:
    self.temperature *= 0.9
    return self.other(self.layer(x) / self.temperature)


def cooling_inside(self: Any, x: Tensor) -> Tensor:
    self.options["scale"] *= 0.9
    return self.other(self.layer(x) / self.options["scale"])


def collecting(self: Any, x: Tensor) -> Tensor:
    self.kept.append(x.detach())
    return self.other(self.layer(x) * len(self.kept))


def written_attribute(self: Any, x: Tensor) -> Tensor:
    self.table.mul_(0.9)
    return self.other(self.layer(x) * self.table)


def written_global(self: Any, x: Tensor) -> Tensor:
    FACTORS[0] *= 0.9
    return self.other(self.layer(x) * FACTORS[0])


def read_tensors(self: Any, x: Tensor) -> Tensor:
    return self.other(self.layer(x) * TABLE + self.table * TABLE.mean())


def tensor_hook(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return self.other(y)


def transformed(self: Any, x: Tensor) -> Tensor:
    return self.other(torch.func.vmap(self.layer)(x))


def detached_branch(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    with torch.no_grad():
        scale = y.abs().mean()
    return self.other(y / scale)


def asks(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    return self.other(y if torch.is_grad_enabled() else 2 * y)


def by_mode(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if self.training:
        y = y * 2
    return self.other(y)


def augmented(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    z = y
    y += x
    return self.other(y * z)


def through_views(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y[:, :2].mul_(2)
    y.view(-1)[0] = 0.5
    return self.other(y)


def reentrant(self: Any, x: Tensor) -> Any:
    return self.other(checkpoint(self.layer, x, use_reentrant=True))


def prints(self: Any, x: Tensor) -> Tensor:
    print("forward")
    return self.other(self.layer(x))


class Case(NamedTuple):
    forward: Callable[[Any, Tensor], Tensor]
    inside: str = ""  # why it is refused in a submodule; nothing: it is exact
    own: str = ""  # why it is refused in the model's own forward
    recorded: str = ""  # the same with a sample


CASES: dict[str, Case] = {
    "function": Case(reversal),
    "function with two results": Case(two_results),
    "average": Case(running_average),
    "average, no_grad": Case(
        average_without_gradients, own="no_grad", recorded="gradients are computed"
    ),
    "count += 1": Case(counting_buffer, own="changes self.count"),
    "new buffer": Case(new_buffer, own="changes self.average", recorded="changes self.average"),
    "part of a buffer": Case(part_of_buffer),
    "weight.data": Case(
        clamped_weight, own="writes to a parameter", recorded="writes to a parameter"
    ),
    "counter": Case(counting, own="changes self.calls", recorded="changes self.calls"),
    "temperature": Case(
        cooling, own="changes self.temperature", recorded="changes self.temperature"
    ),
    "dictionary": Case(cooling_inside, own="changes self.options", recorded="changes self.options"),
    "list": Case(collecting, own=r"changes len\(self.kept", recorded=r"changes len\(self.kept"),
    "attribute written": Case(written_attribute, own="writes to", recorded="writes to"),
    "global written": Case(written_global, own="changes .*FACTORS", recorded="changes .*FACTORS"),
    "tensors read": Case(read_tensors),
    "tensor hook": Case(tensor_hook, own="control flow", recorded="function"),
    "vmap": Case(transformed, own=".", recorded="."),
    "no_grad": Case(detached_branch, own="no_grad", recorded="gradients are computed"),
    "asks": Case(asks, own="is_grad_enabled", recorded="is_grad_enabled"),
    "mode": Case(by_mode, own="control flow", recorded="in evaluation than in training"),
    "augmented": Case(augmented),
    "views": Case(through_views),
    "reentrant checkpoint": Case(reentrant, recorded="."),
    "prints": Case(prints),
}


@pytest.fixture(autouse=True)
def same_globals() -> Any:
    before = list(FACTORS)
    yield
    FACTORS[:] = before


def batches(rows: tuple[int, ...] = (4, 4, 4)) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [(normal(3)(each, generator), normal(3)(each, generator)) for each in rows]


def in_two_stages(
    model: nn.Module,
    folder: Path,
    *,
    layout: str = "stages=2",
    sample: Tensor | None = None,
    given: list[Batch] | None = None,
    between: Callable[[nn.Module], None] | None = None,
    make_optimizer: Any = sgd,
    **options: Any,
) -> list[Outcome]:
    """Trains copies of the model itself, which the ranks cut."""
    size = 4 if "replicas" in layout else 2
    models = [copy.deepcopy(model) for _ in range(size)]
    options.setdefault("check", False)

    def body(run: Run) -> Outcome:
        mine = models[run.rank]
        trainer = run.trainer(
            mine, F.mse_loss, make_optimizer, layout=layout, sample=sample, **options
        )
        recorder = Recorder(mine, trainer.optimizer)
        losses = []
        for x, y in given or batches():
            losses.append(trainer.step(x, y).item())
            if between is not None:
                between(mine)
        prediction = trainer.predict((given or batches())[-1][0])
        return Outcome(losses, recorder.steps, tensors_of(mine), prediction)

    return run_world(size, body, folder=folder)


def expected(model: nn.Module) -> Outcome:
    before = list(FACTORS)
    outcome = plainly(model, batches(), F.mse_loss)
    FACTORS[:] = before
    return outcome


# Ranks are threads of one process, and have the same globals.
@pytest.mark.parametrize("name", [name for name in CASES if name != "global written"])
@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_in_a_submodule(name: str, recorded: bool, tmp_path: Path) -> None:
    case = CASES[name]
    model = drawn(Inside(Part(case.forward)))
    sample = batches()[0][0] if recorded else None
    wanted = expected(model)
    found = in_two_stages(model, tmp_path, sample=sample)
    assert_same(found, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_in_the_model_s_own_forward(name: str, recorded: bool, tmp_path: Path) -> None:
    case = CASES[name]
    model = drawn(Own(case.forward))
    sample = batches()[0][0] if recorded else None
    refusal = case.recorded if recorded else case.own
    if refusal:
        with pytest.raises(UserError, match=f"cannot be cut into stages.*{refusal}"):
            in_two_stages(model, tmp_path, sample=sample)
        return
    wanted = expected(model)
    assert_same(in_two_stages(model, tmp_path, sample=sample), wanted)


class Divided(nn.Module):
    """Divides by a moving average that it changes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            average = 0.9 * self.average + 0.1 * y.mean(0)
        self.average.copy_(average)
        return y * self.average.clone()


def normalised() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def layers(*middle: nn.Module) -> nn.Module:
    """Drawn, and with whatever a parametrization keeps drawn anew too."""
    model = drawn(nn.Sequential(nn.Linear(3, WIDTH), *middle, nn.Linear(WIDTH, 3)))
    generator = torch.Generator().manual_seed(8)
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("kind", [Divided, normalised])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_recomputed_blocks_begin_with_the_buffers_of_their_forward(
    kind: Callable[[], nn.Module], blocks: int, tmp_path: Path
) -> None:
    model = layers(kind(), nn.Tanh(), kind())
    layout = f"stages=2,recompute,recompute_blocks={blocks},balance=2+3"
    assert_same(in_two_stages(model, tmp_path, layout=layout), expected(model))


def test_recomputed_micro_batches_each_begin_with_their_own_buffers(tmp_path: Path) -> None:
    """All forwards come before the first recomputation; the same without one is the measure."""
    model = layers(Divided(), nn.Tanh(), Divided())
    layout = "stages=2,microbatches=2,schedule=gpipe,balance=2+3"
    kept = in_two_stages(model, tmp_path / "kept", layout=layout)
    again = in_two_stages(model, tmp_path / "again", layout=f"{layout},recompute")
    for one, two in zip(kept, again, strict=True):
        assert_same([two], one._replace(weights=two.weights))
        assert one.weights.keys() == two.weights.keys()
        for name, value in one.weights.items():
            torch.testing.assert_close(two.weights[name], value, rtol=0, atol=1e-12, msg=name)


REFUSED_FORWARDS: dict[str, Callable[[], nn.Module]] = {
    "1.parametrizations.weight.0._u": normalised,
    "1.average": Divided,
    "1.calls": lambda: Part(counting),
    "1.temperature": lambda: Part(cooling),
}


@pytest.mark.parametrize("name", REFUSED_FORWARDS)
def test_what_every_forward_changes_goes_with_one_forward_a_step(name: str, tmp_path: Path) -> None:
    model = layers(REFUSED_FORWARDS[name](), nn.Tanh())
    with pytest.raises((InexactError, StageError), match=f"changes '{name}.*microbatches=1"):
        in_two_stages(model, tmp_path / "one", layout="stages=2,microbatches=2", check=True)
    found = in_two_stages(model, tmp_path / "two", layout="stages=2", check=True)
    assert_same(found, expected(model))


def test_an_attribute_changes_twice_where_a_stage_is_recomputed(tmp_path: Path) -> None:
    model = layers(Part(counting), nn.Tanh())
    with pytest.raises((InexactError, StageError), match=r"changes '1.calls'.*runs it twice"):
        in_two_stages(model, tmp_path, layout="stages=2,recompute", check=True)


class Experts(nn.Module):
    """One of two layers, by the values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.mean() > 0.5 else self.two(x)


def heavy(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.001, momentum=0.9, weight_decay=0.1)


def for_experts() -> list[Batch]:
    """The first two go to one expert, the third to the other."""
    return [
        (x.abs() + 3 if index < 2 else -x.abs() - 3, y) for index, (x, y) in enumerate(batches())
    ]


def switching() -> nn.Module:
    model = layers(nn.Identity(), Experts())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    return model


@pytest.mark.parametrize(
    "layout",
    [
        "stages=2,balance=2+2",
        "stages=2,balance=2+2,microbatches=2,schedule=zero-bubble",
        "stages=2,balance=2+2,microbatches=2,schedule=gems",
        "stages=2,balance=2+2,replicas=2+2,microbatches=2",
        "stages=2,balance=2+2,recompute",
    ],
)
def test_what_a_step_has_not_used_is_left_alone(layout: str, tmp_path: Path) -> None:
    model = switching()
    given = for_experts()
    wanted = plainly(model, given, F.mse_loss, heavy)
    assert {"2.one.weight" in step for step in wanted.gradients} == {True, False}
    found = in_two_stages(model, tmp_path, layout=layout, given=given, make_optimizer=heavy)
    assert_same(found, wanted)
    for outcome in found:
        for step, ours in zip(wanted.gradients, outcome.gradients, strict=True):
            assert set(ours) == set(step) & set(outcome.weights)


def test_replicas_agree_on_what_nobody_has_used(tmp_path: Path) -> None:
    """Two pipelines, each with its half of the batch, which go to other experts in one step."""
    model = switching()
    given = for_experts()
    given.append((torch.cat([given[0][0][:2], given[2][0][2:]]), given[0][1]))
    models = [copy.deepcopy(model) for _ in range(4)]

    def body(run: Run) -> dict[str, Tensor]:
        mine = models[run.rank]
        trainer = run.trainer(mine, F.mse_loss, heavy, layout="stages=2,balance=2+2", check=False)
        for x, y in given:
            half = slice(0, 2) if run.rank < 2 else slice(2, 4)
            trainer.step(x[half], y[half])
        return tensors_of(mine)

    def by_expert(network: Any, x: Tensor) -> Tensor:
        return torch.cat([network(x[:2]), network(x[2:])])

    twin = copy.deepcopy(model)
    optimizer = heavy(twin.parameters())
    for x, y in given:
        optimizer.zero_grad()
        F.mse_loss(by_expert(twin, x), y).backward()
        optimizer.step()
    for found in run_world(4, body, folder=tmp_path):
        for name, value in found.items():
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-10, msg=name)


class TwiceUsed(nn.Module):
    """A weight in two places, one in a sum with another, and one that has a hook."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        if kind == "weight hook":
            self.one.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "twice":
            return self.one(self.one(x).tanh())
        if self.kind == "product":
            return F.linear(x, self.one.weight @ self.one.weight) * self.two.weight.sum()
        if self.kind == "sum":
            return F.linear(x, self.one.weight + self.two.weight) + self.one.bias + self.two.bias
        if self.kind == "sum of itself":
            return F.linear(x, self.one.weight + self.one.weight.t()) + self.one.bias.sum()
        if self.kind == "tensor hook":
            y = self.one(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: 3 * gradient)
            return self.two(y)
        if self.kind == "penalty":
            return self.one(x) + self.one.weight.square().sum() + self.two.weight.square().sum()
        if self.kind == "function":
            return self.two(backwards(self.one(x), 0.5))
        return self.one(x)


@pytest.mark.parametrize(
    "kind",
    [
        *("twice", "product", "sum", "sum of itself", "penalty", "function"),
        *("tensor hook", "weight hook"),
    ],
)
def test_a_backward_in_two_halves(kind: str, tmp_path: Path) -> None:
    model = layers(TwiceUsed(kind), nn.Tanh(), nn.Linear(WIDTH, WIDTH), TwiceUsed(kind))
    for each in model:
        if isinstance(each, TwiceUsed) and kind == "weight hook":
            each.one.weight.register_hook(lambda gradient: 2 * gradient)
    layout = "stages=2,microbatches=2,schedule=zero-bubble,balance=3+3"
    assert_same(in_two_stages(model, tmp_path, layout=layout), expected(model))


class Auxiliary(nn.Module):
    """Returns a number of the whole batch too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x).tanh()
        return self.two(y), y.square().mean()


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_a_model_that_returns_a_number_of_the_batch(
    micros: int, recorded: bool, tmp_path: Path
) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + output[1]

    model = drawn(Auxiliary())
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(run: Run) -> Outcome:
        mine = models[run.rank]
        layout = f"stages=2,microbatches={micros}"
        sample = batches()[0][0] if recorded else None
        trainer = run.trainer(mine, loss, sgd, layout=layout, sample=sample)
        recorder = Recorder(mine, trainer.optimizer)
        losses = [trainer.step(x, y).item() for x, y in batches()]
        prediction = trainer.predict(batches()[-1][0])
        return Outcome(losses, recorder.steps, tensors_of(mine), prediction)

    assert_same(run_world(2, body, folder=tmp_path), plainly(model, batches(), loss))


class Told(nn.Module):
    """Its forward reads what a script may change."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.temperature = 1.0
        self.options = {"scale": 1.0}
        self.register_buffer("warmth", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) / self.temperature * self.options["scale"] * self.factor
        return self.two(y.tanh() * self.warmth)


def warmer(model: Any) -> None:
    """And notes something for itself, which the model's code does not read."""
    model.warmth.mul_(1.5)
    model.warmed = getattr(model, "warmed", 0) + 1


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "temperature": (lambda model: setattr(model, "temperature", 0.9), r"temperature \(from 1.0 to"),
    "dictionary": (lambda model: model.options.update(scale=2.0), r"options\['scale'\] \(from 1"),
    "layer": (lambda model: setattr(model, "two", nn.Linear(WIDTH, 3).double()), "two was changed"),
    "hook": (lambda model: model.register_forward_hook(lambda *_: None), "_forward_hooks"),
    "mode": (lambda model: setattr(model, "training", False), r"training was changed to False"),
    "new attribute": (lambda model: setattr(model, "factor", 3.0), "factor"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_what_a_script_changes_between_steps_is_refused(
    name: str, recorded: bool, tmp_path: Path
) -> None:
    change, message = CHANGES[name]
    sample = batches()[0][0] if recorded else None
    with pytest.raises(UserError, match=message):
        in_two_stages(drawn(Told()), tmp_path, sample=sample, between=change)


@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_a_buffer_that_a_script_writes_to_counts(recorded: bool, tmp_path: Path) -> None:
    model = drawn(Told())
    sample = batches()[0][0] if recorded else None
    found = in_two_stages(model, tmp_path, sample=sample, between=warmer)
    twin = copy.deepcopy(model)
    optimizer = sgd(twin.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(twin(x), y).backward()
        optimizer.step()
        warmer(twin)
    for outcome in found:
        for name, value in outcome.weights.items():
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(outcome.prediction, twin.eval()(batches()[-1][0]).detach())


def test_modules_in_evaluation_stay_so_after_a_prediction(tmp_path: Path) -> None:
    """A BatchNorm that a script has frozen."""
    model = layers(nn.BatchNorm1d(WIDTH), nn.Tanh())
    model[1].eval()

    def body(run: Run) -> list[bool]:
        mine = models[run.rank]
        trainer = run.trainer(mine, F.mse_loss, sgd, layout="stages=2")
        trainer.step(*batches()[0])
        trainer.predict(batches()[0][0])
        return [each.training for each in mine]

    models = [copy.deepcopy(model) for _ in range(2)]
    assert run_world(2, body, folder=tmp_path) == [[True, False, True, True]] * 2


def doubled(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return 2 * output


def halved(module: nn.Module, gradients: Any, outer: Any) -> Any:
    return tuple(None if gradient is None else gradient / 2 for gradient in gradients)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(doubled),
    "before": lambda module: module.register_forward_pre_hook(lambda _, given: (2 * given[0],)),
    "backward": lambda module: module.register_full_backward_hook(halved),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_hooks_of_modules(name: str, recorded: bool, tmp_path: Path) -> None:
    """Of one that is opened, of a layer, and of the model itself."""
    model = drawn(Inside(Part(lambda self, x: self.other(self.layer(x)))))
    HOOKS[name](model.part)
    HOOKS[name](model.after)
    sample = batches()[0][0] if recorded else None
    assert_same(in_two_stages(model, tmp_path / "inside", sample=sample), expected(model))
    HOOKS[name](model)
    with pytest.raises(UserError, match="it has hooks"):
        in_two_stages(model, tmp_path / "own", sample=sample)


def draws_by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) * float(np.random.rand())


def draws_from_a_generator(self: Any, x: Tensor) -> Tensor:
    noise = torch.rand(WIDTH, generator=self.options["generator"], dtype=torch.float64)
    return self.layer(x) + noise


def draws_from_torch(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + torch.rand(WIDTH, dtype=torch.float64)


def lowers(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.layer(x)
    return y.to(x.dtype)


KEPT: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "numpy": (draws_by_numpy, "random number"),
    "generator": (draws_from_a_generator, "random number"),
    "torch": (draws_from_torch, "random number"),
    "autocast": (lowers, "autocast"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_only_runs_as_it_is_written(name: str) -> None:
    forward, why = KEPT[name]
    model = Inside(Part(forward))
    model.part.options["generator"] = torch.Generator().manual_seed(2)
    before = model.part.options["generator"].get_state(), np.random.get_state()[1].tobytes()
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["before", "part", "after"]
    assert why in blocks[1].module.meta["whole"]["part"]
    assert torch.equal(model.part.options["generator"].get_state(), before[0])
    assert np.random.get_state()[1].tobytes() == before[1]


class Parametrized(nn.Module):
    """Uses a parametrized weight of its own, and one that is normalised by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        parametrizations.orthogonal(self, "weight", use_trivialization=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.linear(x, self.weight).tanh())


@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
def test_parametrized_weights(recorded: bool, tmp_path: Path) -> None:
    model = drawn(Inside(Parametrized()))
    sample = batches()[0][0] if recorded else None
    assert_same(in_two_stages(model, tmp_path, sample=sample), expected(model))

"""Many ranks train to the very weights that one process reaches on the same global batches.

Each scene is one training script, written once. It runs in plain PyTorch on whole batches, and on
1 to 4 ranks that share them; batches and tails are uneven. In float64 the weights must agree to
1e-12.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.sync import AllReduce
from farandole.testing import run_world
from farandole.train import Run

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Cut:
    count: int = 24  # 10 + 10 + 4: a step's shares are uneven on 3 and 4 ranks
    batch: int = 10
    epochs: int = 2
    image: bool = False
    drop_last: bool = False

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        shape = (self.count, 2, 5, 5) if self.image else (self.count, 6)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(3, (self.count,), generator=generator))


class World(Protocol):
    shares: Shares

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> nn.Module: ...
    def epoch(self) -> Iterator[Batch]: ...
    def evaluate(self, model: nn.Module) -> None: ...
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]: ...


class Plain:
    """PyTorch alone, on the steps of one worker."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.shares = Shares(cut.count, 1, cut.batch, cut.drop_last)
        self.epochs = 0

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return model

    def epoch(self) -> Iterator[Batch]:
        order = torch.tensor(shuffled(self.cut.count, 0, self.epochs))
        self.epochs += 1
        x, y = self.cut.data().tensors
        for step in range(self.shares.steps):
            chosen = order[list(self.shares.global_range(step))]
            yield x[chosen], y[chosen]

    def evaluate(self, model: nn.Module) -> None:
        pass

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class Ranks:
    """The same, as a script under Farandole does it."""

    def __init__(self, cut: Cut, run: Run) -> None:
        self.cut = cut
        self.run = run
        self.data = cut.data()
        self.shares = Shares(cut.count, run.size, cut.batch, cut.drop_last)

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        if self.run.rank:  # rank 0's weights must win
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        return self.run.distribute(model, optimizer)[0]

    def epoch(self) -> Iterator[Batch]:
        batch, drop_last = self.cut.batch, self.cut.drop_last
        yield from self.run.loader(self.data, global_batch_size=batch, drop_last=drop_last)

    def evaluate(self, model: nn.Module) -> None:
        with torch.no_grad():
            for x, _ in self.run.loader(self.data, batch_size=2, shuffle=False):
                model(x)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.run.no_sync(model)


Scene = Callable[[World, Cut], list[nn.Module]]


def both(
    folder: Path, scene: Scene, cut: Cut, size: int, sync: AllReduce | None = None
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The weights that the scene ends with in plain PyTorch, and on each of `size` ranks."""

    def state(models: list[nn.Module]) -> dict[str, torch.Tensor]:
        return {f"{i}.{k}": v for i, model in enumerate(models) for k, v in weights(model).items()}

    plain = state(scene(Plain(cut), cut))
    ranks = run_world(
        size, lambda run: state(scene(Ranks(cut, run), cut)), folder=folder, sync=sync
    )
    return plain, ranks


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_parity(plain: dict[str, torch.Tensor], ranks: list[dict[str, torch.Tensor]]) -> None:
    for state in ranks:
        assert state.keys() == plain.keys()
        for name, value in state.items():
            assert torch.equal(value, ranks[0][name]), f"ranks differ in {name}"
            torch.testing.assert_close(
                value, plain[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model whose first weights do not depend on torch's generator, which all threads share."""
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def fit(
    world: World,
    cut: Cut,
    model: nn.Module,
    optimizer: Optimizer,
    logits: Callable[[Any], torch.Tensor] = lambda output: output,
) -> list[nn.Module]:
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        for x, y in world.epoch():
            optimizer.zero_grad()
            F.cross_entropy(logits(wrapped(x)), y).backward()
            optimizer.step()
    return [model]


def plain_mlp(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(mlp)
    return fit(world, cut, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def with_adamw(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(mlp)
    # A large eps: where a gradient is nearly 0, Adam turns its last bit into a whole step.
    return fit(world, cut, model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3))


def with_adam(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(mlp)
    return fit(world, cut, model, torch.optim.Adam(model.parameters(), 0.01, eps=1e-3))


def by_closure(world: World, cut: Cut) -> list[nn.Module]:
    """L-BFGS computes gradients several times in a step."""
    model = seeded(mlp)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=2)
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        for x, y in world.epoch():

            def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                loss.backward()
                return loss

            optimizer.step(compute)
    return [model]


def conv_with_batchnorm(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2),
            nn.BatchNorm2d(4, momentum=None),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )
    return fit(world, cut, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


def accumulating(world: World, cut: Cut) -> list[nn.Module]:
    """Every second batch takes a step, with the gradients of both; the tail's own too."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(world.epoch()):
            last = index % 2 == 1 or index == world.shares.steps - 1
            with nullcontext() if last else world.no_sync(wrapped):
                F.cross_entropy(wrapped(x), y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return [model]


def frozen(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(mlp)
    model[0].requires_grad_(False)
    before = weights(model[0])
    models = fit(world, cut, model, torch.optim.SGD(model[2].parameters(), 0.1))
    if isinstance(world, Plain) or world.run.rank == 0:
        assert all(torch.equal(before[k], v) for k, v in weights(model[0]).items())
    return models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.into.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.back(torch.tanh(self.into(x))))


def tied(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(Tied)
    models = fit(world, cut, model, torch.optim.SGD(model.parameters(), 0.1))
    assert model.back.weight is model.into.weight
    return models


class Branches(nn.Module):
    """Takes one of two ways by the number of the call, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.ways[self.calls % 2](x)


def unused(world: World, cut: Cut) -> list[nn.Module]:
    model = seeded(Branches)
    return fit(world, cut, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def adversarial(world: World, cut: Cut) -> list[nn.Module]:
    """Two models, two optimizers; the generator learns through the discriminator."""
    generator = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), 1)
    critic = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), 2)
    paint = torch.optim.SGD(generator.parameters(), 0.1)
    judge = torch.optim.SGD(critic.parameters(), 0.1)
    painter, critic_too = world.distribute(generator, paint), world.distribute(critic, judge)
    for _ in range(cut.epochs):
        for real, _ in world.epoch():
            noise = real.flip(1)
            judge.zero_grad()
            (critic_too(painter(noise).detach()).mean() - critic_too(real).mean()).backward()
            judge.step()
            paint.zero_grad()
            (-critic_too(painter(noise)).mean() + painter(noise).square().mean()).backward()
            paint.step()
    return [generator, critic]


def adversarial_by_halves(world: World, cut: Cut) -> list[nn.Module]:
    """The critic is frozen while the generator learns, and at the end of every step."""
    generator = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), 1)
    critic = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), 2)
    paint = torch.optim.SGD(generator.parameters(), 0.1)
    judge = torch.optim.SGD(critic.parameters(), 0.1)
    painter, critic_too = world.distribute(generator, paint), world.distribute(critic, judge)
    for _ in range(cut.epochs + 1):
        for real, _ in world.epoch():
            fake = painter(real.flip(1))
            critic.requires_grad_(True)
            judge.zero_grad()
            (critic_too(fake.detach()).mean() - critic_too(real).mean()).backward()
            judge.step()
            critic.requires_grad_(False)
            paint.zero_grad()
            (-critic_too(fake).mean() + fake.square().mean()).backward()
            paint.step()
    return [generator, critic]


def thawed_in_the_middle(world: World, cut: Cut) -> list[nn.Module]:
    """A backbone that was wholly frozen when it was distributed; thawed before an uneven batch."""
    backbone = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), 1)
    head = seeded(lambda: nn.Linear(6, 3), 2)
    backbone.requires_grad_(False)
    slow = torch.optim.SGD(backbone.parameters(), 0.05)
    fast = torch.optim.SGD(head.parameters(), 0.1)
    below, above = world.distribute(backbone, slow), world.distribute(head, fast)
    for _ in range(cut.epochs):
        for step, (x, y) in enumerate(world.epoch()):
            if step == world.shares.steps - 1:
                backbone.requires_grad_(True)
            slow.zero_grad()
            fast.zero_grad()
            F.cross_entropy(above(below(x)), y).backward()
            slow.step()
            fast.step()
    return [backbone, head]


def one_trunk(world: World, cut: Cut) -> list[nn.Module]:
    """An actor and a critic that share layers; both are distributed."""
    trunk = seeded(lambda: nn.Linear(6, 8), 1)
    actor = nn.Sequential(trunk, nn.Tanh(), seeded(lambda: nn.Linear(8, 3), 2))
    critic = nn.Sequential(trunk, nn.Tanh(), seeded(lambda: nn.Linear(8, 1), 3))
    acts = torch.optim.SGD(actor.parameters(), 0.1)
    judges = torch.optim.SGD(critic[2].parameters(), 0.1)
    actor_too, critic_too = world.distribute(actor, acts), world.distribute(critic, judges)
    for _ in range(cut.epochs):
        for x, y in world.epoch():
            acts.zero_grad()
            judges.zero_grad()
            value = (critic_too(x).squeeze(1) - y).square().mean()
            (F.cross_entropy(actor_too(x), y) + value).backward()
            acts.step()
            judges.step()
    return [actor, critic]


def twice_through_one_model(world: World, cut: Cut) -> list[nn.Module]:
    """The model's output is its own input, as in a recurrent or iterative model."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        for x, _ in world.epoch():
            optimizer.zero_grad()
            wrapped(wrapped(x)).square().sum(1).mean().backward()
            optimizer.step()
    return [model]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What many libraries return: neither a tensor nor a dict."""

    logits: torch.Tensor
    extra: dict[str, Any]


class Policy(nn.Module):
    """Returns a parameter as it is, beside what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(6, 3)
        self.spread = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.inner(x)
        if self.kind == "tuple":
            return logits, [self.spread]
        if self.kind == "dict":
            return {"logits": logits, "spread": self.spread, "name": "policy"}
        return Answer(logits, {"spread": self.spread})


def structured(kind: str) -> Scene:
    def logits(output: Any) -> torch.Tensor:
        if kind == "tuple":
            scores, (spread,) = output
        elif kind == "dict":
            scores, spread = output["logits"], output["spread"]
        else:
            scores, spread = output.logits, output.extra["spread"]
        scores += 0.5  # in place, as users do
        return scores * spread.exp()

    def scene(world: World, cut: Cut) -> list[nn.Module]:
        model = seeded(lambda: Policy(kind))
        return fit(world, cut, model, torch.optim.SGD(model.parameters(), 0.1), logits)

    return scene


def evaluating_on_the_way(world: World, cut: Cut) -> list[nn.Module]:
    """Evaluation between drawing a batch and using it must not change the batch's weight."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        for x, y in world.epoch():
            world.evaluate(wrapped)
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return [model]


def regularised(world: World, cut: Cut) -> list[nn.Module]:
    """A term of the loss that depends on the parameters alone."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = world.distribute(model, optimizer)
    for _ in range(cut.epochs):
        for x, y in world.epoch():
            optimizer.zero_grad()
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            (F.cross_entropy(wrapped(x), y) + 0.01 * penalty).backward()
            optimizer.step()
    return [model]


SCENES: dict[str, Scene] = {
    "mlp": plain_mlp,
    "adam": with_adam,
    "adamw": with_adamw,
    "closure": by_closure,
    "accumulating": accumulating,
    "frozen": frozen,
    "tied": tied,
    "adversarial": adversarial,
    "by halves": adversarial_by_halves,
    "thawed": thawed_in_the_middle,
    "one trunk": one_trunk,
    "twice": twice_through_one_model,
    "tuple": structured("tuple"),
    "dict": structured("dict"),
    "dataclass": structured("dataclass"),
    "evaluating": evaluating_on_the_way,
    "regularised": regularised,
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCENES)
def test_parity(tmp_path: Path, name: str, size: int) -> None:
    assert_parity(*both(tmp_path, SCENES[name], Cut(), size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parity_with_synchronised_batchnorm(tmp_path: Path, size: int) -> None:
    sync = AllReduce(batchnorm="sync")
    assert_parity(*both(tmp_path, conv_with_batchnorm, Cut(image=True), size, sync))


def test_local_batchnorm_is_not_the_whole_batch_s(tmp_path: Path) -> None:
    """The default, and what the test above would see if synchronising did nothing."""
    plain, ranks = both(tmp_path, conv_with_batchnorm, Cut(image=True), 2)
    with pytest.raises(AssertionError):
        assert_parity(plain, ranks)


@pytest.mark.parametrize("size", [1, 3])
def test_parity_with_unused_parameters(tmp_path: Path, size: int) -> None:
    assert_parity(*both(tmp_path, unused, Cut(), size, AllReduce()))


@pytest.mark.parametrize("bucket_mib", [1e-5, 25.0])
def test_parity_whatever_the_buckets(tmp_path: Path, bucket_mib: float) -> None:
    assert_parity(*both(tmp_path, plain_mlp, Cut(), 3, AllReduce(bucket_mib=bucket_mib)))


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "adam"])
def test_37_samples_in_batches_of_6_on_4_workers(tmp_path: Path, name: str, epochs: int) -> None:
    """The last step has one sample, and is a step of its own."""
    assert_parity(*both(tmp_path, SCENES[name], Cut(37, 6, epochs), 4))


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Cut(13, 6), id="all read the one sample of the last step"),
        pytest.param(Cut(19, 16), id="all read its three samples"),
        pytest.param(Cut(15, 6), id="each reads one of its three samples"),
    ],
)
@pytest.mark.parametrize("name", SCENES)
def test_parity_where_workers_share_samples(tmp_path: Path, name: str, cut: Cut) -> None:
    assert_parity(*both(tmp_path, SCENES[name], cut, 4))


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(2, 4),
    count=st.integers(4, 30),
    batch=st.integers(4, 12),
    epochs=st.integers(1, 3),
    image=st.booleans(),
    drop_last=st.booleans(),
)
def test_parity_on_any_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    count: int,
    batch: int,
    epochs: int,
    image: bool,
    drop_last: bool,
) -> None:
    assume(not drop_last or count >= batch)
    cut = Cut(count, batch, epochs, image, drop_last)
    scene = conv_with_batchnorm if image else plain_mlp
    sync = AllReduce(batchnorm="sync")
    assert_parity(*both(tmp_path_factory.mktemp("any"), scene, cut, size, sync))

"""Local SGD, block momentum, DiLoCo and federated averaging, against plain PyTorch.

The oracle trains one plain model for each rank on that rank's share of the data, and averages them
by hand. Both sides run in float64 and must agree to 1e-12, on every rank, the optimizers included.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.sync import AllReduce, DiLoCo, Federated, Local, Strategy
from farandole.testing import run_world
from farandole.train import Run

Tensors = dict[str, torch.Tensor]


# Models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.into.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.back(torch.tanh(self.into(x))))


class Odd(nn.Module):
    """Complex, empty, 0-d, unused and single-precision parameters, a mask and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.turn = nn.Parameter(torch.zeros(3, 6, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.never = nn.Parameter(torch.zeros(2))
        self.single = nn.Parameter(torch.zeros(3, dtype=torch.float32))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("constant", torch.tensor(2.0))

    def double(self) -> Odd:
        return self  # it is as precise as it wants to be

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.to(torch.complex128) @ self.turn.T).abs() * self.mask * self.constant
        return hidden * self.scale.exp() + self.single.double() + self.nothing.sum()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Without torch's own generator, which all ranks here share."""
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            real.copy_(torch.randn(real.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    # A large eps: where a gradient is nearly 0, Adam turns its last bit into a whole step.
    return torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)


# The same job twice: under Farandole and by hand


@dataclasses.dataclass(frozen=True)
class Job:
    size: int = 3
    count: int = 23  # 3 ranks: 10 + 13; 2 and 4 ranks too have a tail
    batch: int = 10
    epochs: int = 2
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    prepare: Callable[[nn.Module, int], object] = lambda model, epoch: None  # before each epoch
    accumulate: int = 1  # batches for each step of the optimizer
    stop_after: int | None = None  # so many batches of an epoch, `break`
    evaluate: bool = False  # in the middle of each epoch
    look: bool = False  # at one batch before the training
    dtype: torch.dtype | None = None  # of autocast

    @property
    def shares(self) -> Shares:
        return Shares(self.count, self.size, self.batch)

    @property
    def steps(self) -> int:
        """Batches of an epoch that are used."""
        return min(self.shares.steps, self.stop_after or self.shares.steps)

    def is_step(self, batch: int) -> bool:
        return (batch + 1) % self.accumulate == 0 or batch == self.steps - 1

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.count, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(3, (self.count,), generator=generator))

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            return F.cross_entropy(model(x), y)


def result(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """All that training has changed."""
    moments = {
        f"{index}.{name}": value.clone()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }
    return {**{k: v.detach().clone() for k, v in model.state_dict().items()}, **moments}


def train(run: Run, job: Job, sync: Strategy | None = None) -> Tensors:
    model = seeded(job.model, seed=run.rank)  # rank 0's counts
    job.prepare(model, 0)
    optimizer = job.optimizer(model)
    wrapped, _ = run.distribute(model, optimizer, sync=sync)
    data = job.data()
    if job.look:
        next(iter(run.loader(data, global_batch_size=job.batch)))
    for epoch in range(job.epochs):
        job.prepare(model, epoch)
        for batch, (x, y) in enumerate(run.loader(data, global_batch_size=job.batch)):
            if job.evaluate:
                with torch.no_grad():
                    for inputs, _ in run.loader(data, batch_size=2, shuffle=False):
                        wrapped.eval()(inputs)
                wrapped.train()
            job.loss(wrapped, x, y).backward()
            if job.is_step(batch):
                optimizer.step()
                optimizer.zero_grad()
            if batch + 1 == job.stop_after:
                break
        assert run.sum(1.0) == run.size  # whatever all ranks do together ends a broken-off epoch
    return result(model, optimizer)


def trained(job: Job, sync: Strategy, folder: Path) -> list[Tensors]:
    return run_world(job.size, lambda run: train(run, job), folder=folder, sync=sync)


class Simulation:
    """One plain model for each rank."""

    def __init__(self, job: Job, sync: Local | DiLoCo | Federated) -> None:
        self.job, self.sync = job, sync
        self.models = [seeded(job.model) for _ in range(job.size)]
        for model in self.models:
            job.prepare(model, 0)
        self.optimizers = [job.optimizer(model) for model in self.models]
        self.base = [p.detach().clone().requires_grad_() for p in self.models[0].parameters()]
        self.outer: Optimizer | None = None
        if isinstance(sync, DiLoCo):
            self.outer = torch.optim.SGD(self.base, sync.rate, sync.momentum, nesterov=True)
        elif isinstance(sync, Local) and sync.momentum:
            self.outer = torch.optim.SGD(self.base, 1.0, sync.momentum)
        self.data = job.data().tensors
        self.samples = [0] * job.size  # since they last met
        self.in_round = self.since = self.rounds = 0

    def run(self) -> list[Tensors]:
        for epoch in range(self.job.epochs):
            self.prepare(epoch)
            order = torch.tensor(shuffled(self.job.count, 0, epoch + self.job.look))
            for batch in range(self.job.steps):
                for rank in range(self.job.size):
                    self.learn(rank, order, batch)
                if self.job.is_step(batch):
                    self.step()
            if self.since and self.sync.meet_epochs:
                self.meet()
        return [result(*pair) for pair in zip(self.models, self.optimizers, strict=True)]

    def prepare(self, epoch: int) -> None:
        for model in self.models:
            before = {p for p in model.parameters() if p.requires_grad}
            self.job.prepare(model, epoch)
            more = {p for p in model.parameters() if p.requires_grad} - before
        if more and self.outer is not None:
            self.outer.state.clear()  # where more is trained, momentum starts afresh

    def learn(self, rank: int, order: torch.Tensor, batch: int) -> None:
        x, y = self.data
        mine = order[list(self.job.shares.share(batch, rank))]
        loss = self.job.loss(self.models[rank], x[mine], y[mine])
        self.samples[rank] += len(mine)
        federated = isinstance(self.sync, Federated)
        weight = 1.0 if federated else self.job.shares.share_weight(batch, rank)
        trained = [p for p in self.models[rank].parameters() if p.requires_grad]
        # Weighed where it is added up: single precision would round a weighed loss elsewhere.
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                before = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = before + weight * gradient

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.since += 1
        self.in_round += 1
        if self.in_round == self.sync.every:
            self.meet()

    def meet(self) -> None:
        weights = self.weights()
        self.average([list(model.parameters()) for model in self.models], weights)
        self.average([statistics(model) for model in self.models], weights)
        round_is_over = self.outer is None or self.in_round == self.sync.every
        if self.outer is not None and round_is_over:
            for where, arrived in zip(self.base, self.models[0].parameters(), strict=True):
                where.grad = where.detach() - arrived.detach()
            self.outer.step()
            for model in self.models:
                for parameter, where in zip(model.parameters(), self.base, strict=True):
                    parameter.data.copy_(where)
        if self.sync.moments == "average":
            equal = [1 / self.job.size] * self.job.size
            self.average([moments(optimizer) for optimizer in self.optimizers], equal)
        elif self.sync.moments == "reset" and round_is_over:
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()  # Adam's count of steps too: it starts afresh
        self.since, self.samples = 0, [0] * self.job.size
        if round_is_over:
            self.in_round = 0
            self.rounds += 1

    def weights(self) -> list[float]:
        if not isinstance(self.sync, Federated):
            return [1 / self.job.size] * self.job.size
        count = max(1, round(self.sync.fraction * self.job.size))
        draw = random.Random(f"{self.sync.seed}/{self.rounds}")
        chosen = draw.sample(range(self.job.size), count)
        total = sum(self.samples[rank] for rank in chosen)
        return [
            self.samples[rank] / total if rank in chosen else 0.0 for rank in range(self.job.size)
        ]

    @staticmethod
    @torch.no_grad()
    def average(lists: list[list[torch.Tensor]], weights: list[float]) -> None:
        for alike in zip(*lists, strict=True):
            if len(set(weights)) == 1:
                mean = sum(alike[1:], alike[0].clone()) / len(alike)
            else:
                mean = sum(value * weight for value, weight in zip(alike, weights, strict=True))
            for value in alike:
                value.copy_(mean)


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [value for name, value in model.named_buffers() if "running" in name]


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]


def assert_same(found: list[Tensors], expected: list[Tensors], tolerance: float = 1e-12) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            close = 1e-6 if value.dtype == torch.float32 else tolerance
            torch.testing.assert_close(
                mine[name],
                value,
                rtol=close,
                atol=close,
                msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}",
            )


def assert_as_simulated(job: Job, sync: Local | DiLoCo | Federated, folder: Path) -> None:
    assert_same(trained(job, sync, folder), Simulation(job, sync).run())


# One step alone is all-reduce


@settings(max_examples=8)
@given(size=st.integers(2, 4), count=st.integers(4, 30), batch=st.integers(4, 12))
def test_a_period_of_one_step_is_allreduce(
    tmp_path_factory: pytest.TempPathFactory, size: int, count: int, batch: int
) -> None:
    """SGD is linear in the gradient: weight decay and momentum may come before the average."""
    job = Job(size, count, batch)
    folder = tmp_path_factory.mktemp("one")
    every_step = trained(job, Local(every=1), folder)
    reduced = trained(job, AllReduce(), folder)
    for mine, theirs in zip(every_step, reduced, strict=True):
        for name in mlp().state_dict():  # each rank has its own momentum, of the same average
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=1e-12)


def test_a_longer_period_is_not(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    apart, reduced = (trained(Job(), sync, tmp_path)[0] for sync in (Local(every=2), AllReduce()))
    assert not torch.allclose(apart["0.weight"], reduced["0.weight"], rtol=1e-6)


# Periods


@settings(max_examples=15)
@given(
    size=st.integers(1, 4),
    count=st.integers(4, 40),
    batch=st.integers(4, 10),
    every=st.integers(1, 6),
    meet_epochs=st.booleans(),
    model=st.sampled_from([mlp, normed]),
)
def test_any_period_on_any_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    count: int,
    batch: int,
    every: int,
    meet_epochs: bool,
    model: Callable[[], nn.Module],
) -> None:
    if model is normed:  # BatchNorm refuses a single sample
        batch = max(batch, 2 * size)
        count = max(count, batch) // batch * batch + 2 * size
    job = Job(size, count, batch, model=model)
    folder = tmp_path_factory.mktemp("any")
    assert_as_simulated(job, Local(every=every, meet_epochs=meet_epochs), folder)


@settings(max_examples=12)
@given(
    size=st.integers(1, 3),
    every=st.integers(1, 7),  # of 3 steps an epoch: rounds span epochs
    momentum=st.sampled_from([0.3, 0.9]),
    nesterov=st.booleans(),
    meet_epochs=st.booleans(),
)
def test_outer_momentum(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    every: int,
    momentum: float,
    nesterov: bool,
    meet_epochs: bool,
) -> None:
    sync: Local | DiLoCo = Local(every=every, momentum=momentum, meet_epochs=meet_epochs)
    if nesterov:
        sync = DiLoCo(every=every, rate=0.6, momentum=momentum, meet_epochs=meet_epochs)
    job = Job(size, count=28, epochs=4)
    assert_as_simulated(job, sync, tmp_path_factory.mktemp("outer"))


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("kept", ["keep", "average", "reset"])
@pytest.mark.parametrize("kind", [Local, DiLoCo])
def test_what_becomes_of_the_moments(
    kind: type[Local | DiLoCo], kept: Any, optimizer: Any, tmp_path: Path
) -> None:
    """A period of 2 in an epoch of 3 steps: there are averages that end a round and others."""
    job = Job(count=28, epochs=3, optimizer=optimizer)
    assert_as_simulated(job, kind(every=2, moments=kept), tmp_path)


# Federated averaging


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("every", [1, 2])
def test_federated_averaging(fraction: float, every: int, tmp_path: Path) -> None:
    """10 samples in each step for 4 ranks: 2 have 2 and 2 have 3."""
    job = Job(size=4, count=30, epochs=3)
    assert_as_simulated(job, Federated(every=every, fraction=fraction, seed=3), tmp_path)


def test_the_seed_draws_the_ranks(tmp_path: Path) -> None:
    first, again, other = (
        trained(Job(4, 30), Federated(every=2, fraction=0.25, seed=seed), tmp_path)[0]["0.weight"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, rtol=1e-6)


def test_the_others_work_is_thrown_away(tmp_path: Path) -> None:
    """With a fraction for one rank, all end with the model of one that has trained alone."""
    job = Job(size=3, count=20, batch=10, epochs=1)  # one round
    alone = Simulation(job, Federated(every=9, meet_epochs=False)).run()
    found = trained(job, Federated(every=2, fraction=0.01), tmp_path)
    assert all(torch.equal(end["0.weight"], found[0]["0.weight"]) for end in found)
    assert sum(torch.equal(end["0.weight"], found[0]["0.weight"]) for end in alone) == 1


# Models of all kinds


def head_first(model: nn.Module, epoch: int) -> None:
    """Fine-tuning: the rest is frozen at first, and trained later."""
    model[0].requires_grad_(epoch > 0)


def head_last(model: nn.Module, epoch: int) -> None:
    """The other way round: what has been trained is frozen."""
    model[0].requires_grad_(epoch == 0)


JOBS = {
    "frozen, then trained": Job(prepare=head_first, epochs=3),
    "trained, then frozen": Job(prepare=head_last, epochs=3),
    "tied": Job(model=Tied),
    "odd": Job(model=Odd),
    "batchnorm": Job(model=normed, count=28),
    "accumulating": Job(accumulate=2, count=47),
    "evaluating": Job(evaluate=True),
    "evaluating with batchnorm": Job(model=normed, count=28, evaluate=True),
    "breaking off": Job(stop_after=3, count=47),
    "looking at the data first": Job(look=True),
    "alone": Job(size=1),
    "autocast": Job(size=2, count=20, dtype=torch.bfloat16),  # in equal shares: exactly the same
}


@pytest.mark.parametrize("sync", [Local(every=2), Local(every=2, momentum=0.5), DiLoCo(every=3)])
@pytest.mark.parametrize("name", JOBS)
def test_jobs_of_all_kinds(name: str, sync: Local | DiLoCo, tmp_path: Path) -> None:
    assert_as_simulated(JOBS[name], sync, tmp_path)


@pytest.mark.parametrize("name", ["frozen, then trained", "trained, then frozen", "tied"])
def test_jobs_of_all_kinds_with_a_codec(name: str, tmp_path: Path) -> None:
    """These tensors are so small that a codec lets them travel as they are."""
    expected = Simulation(JOBS[name], Local(every=2)).run()
    assert_same(trained(JOBS[name], Local(every=2, codec="int8"), tmp_path), expected)


def test_two_models_in_one_run(tmp_path: Path) -> None:
    """Each with its own strategy; they meet at different times."""
    first, second = Job(count=28, model=normed), Job(count=28, model=Tied, optimizer=adam)
    syncs = [Local(every=2, momentum=0.5), DiLoCo(every=3)]

    def body(run: Run) -> tuple[Tensors, Tensors]:
        models = [seeded(job.model) for job in (first, second)]
        optimizers = [sgd(models[0]), adam(models[1])]
        wrapped = [
            run.distribute(model, optimizer, sync=sync)[0]
            for model, optimizer, sync in zip(models, optimizers, syncs, strict=True)
        ]
        data = first.data()
        for _ in range(first.epochs):
            for x, y in run.loader(data, global_batch_size=first.batch):
                for job, model, optimizer in zip((first, second), wrapped, optimizers, strict=True):
                    job.loss(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return result(models[0], optimizers[0]), result(models[1], optimizers[1])

    ends = run_world(3, body, folder=tmp_path)
    assert_same([end for end, _ in ends], Simulation(first, syncs[0]).run())
    assert_same([end for _, end in ends], Simulation(second, syncs[1]).run())


def test_a_generator_learns_through_its_critic(tmp_path: Path) -> None:
    """The weight of a batch enters each model once, where the gradient enters it."""

    def body(run: Run) -> list[Tensors]:
        painter = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), 1)
        critic = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), 2)
        paint, judge = sgd(painter), sgd(critic)
        painting, judging = run.distribute(painter, paint)[0], run.distribute(critic, judge)[0]
        data = Job().data()
        for _ in range(2):
            for real, _ in run.loader(data, global_batch_size=10):
                judge.zero_grad()
                (judging(painting(real.flip(1)).detach()).mean() - judging(real).mean()).backward()
                judge.step()
                paint.zero_grad()
                (-judging(painting(real.flip(1))).mean()).backward()
                paint.step()
        return [copy.deepcopy(model.state_dict()) for model in (painter, critic)]

    found = run_world(3, body, folder=tmp_path, sync=Local(every=1))
    expected = run_world(3, body, folder=tmp_path, sync=AllReduce())
    for model in range(2):
        assert_same([end[model] for end in found], [end[model] for end in expected])


# Compressed


@pytest.mark.parametrize(
    ("codec", "share"), [("fp16", 0.001), ("int8", 0.02), ("topk:ratio=0.4", 0.5)]
)
@pytest.mark.parametrize("kind", [Local, DiLoCo, Federated])
def test_a_codec_rounds_how_far_ranks_have_moved(
    kind: Any, codec: str, share: float, tmp_path: Path
) -> None:
    """Not where they stand: the mistake is small against the way they went."""
    job = Job(count=28, epochs=4, model=lambda: nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 3)))
    start = seeded(job.model).state_dict()
    exact = trained(job, kind(every=2), tmp_path)[0]
    ends = trained(job, kind(every=2, codec=codec), tmp_path)
    for name, where in start.items():
        assert all(torch.equal(end[name], ends[0][name]) for end in ends)
        way, mistake = (exact[name] - where).norm(), (ends[0][name] - exact[name]).norm()
        assert mistake < share * way
    assert not torch.equal(ends[0]["0.weight"], exact["0.weight"])

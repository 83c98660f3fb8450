"""Post-local SGD: all-reduce to the bit at first, and local SGD from where that has arrived.

The oracle trains one plain model for each rank. At first their gradients are averaged by hand,
later their parameters.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.errors import DivergedError
from farandole.sync import AllReduce, PostLocal, Strategy
from farandole.testing import run_world
from farandole.train import Run

COUNT, BATCH, EPOCHS = 36, 10, 3  # 4 steps an epoch, uneven shares, a tail
Tensors = dict[str, torch.Tensor]
Curve = Callable[[int], float]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def falls_at(*steps: int) -> Curve:
    """To a tenth at each of these steps."""
    return lambda now: 0.1 ** sum(now >= step for step in steps)


@dataclasses.dataclass(frozen=True)
class Job:
    size: int = 3
    curve: Curve = dataclasses.field(default_factory=lambda: falls_at(5))
    model: Callable[[], nn.Module] = mlp
    accumulate: int = 1

    @property
    def shares(self) -> Shares:
        return Shares(COUNT, self.size, BATCH)

    def is_step(self, batch: int) -> bool:
        return (batch + 1) % self.accumulate == 0 or batch == self.shares.steps - 1

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        return optimizer, LambdaLR(optimizer, self.curve)


def train(run: Run, job: Job) -> Tensors:
    model = seeded(job.model)
    optimizer, scheduler = job.optimizer(model)
    wrapped, _ = run.distribute(model, optimizer)
    source = data()
    for _ in run.epochs(EPOCHS):
        for batch, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
            with nullcontext() if job.is_step(batch) else run.no_sync(wrapped):
                F.cross_entropy(wrapped(x), y).backward()
            if job.is_step(batch):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        run.log(accuracy=0.5)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def trained(job: Job, sync: Strategy, folder: Path) -> list[Tensors]:
    return run_world(job.size, lambda run: train(run, job), folder=folder, sync=sync)


class Simulation:
    """Synchronous for the first `switch` steps of the optimizer."""

    def __init__(self, job: Job, sync: PostLocal, switch: int) -> None:
        self.job, self.sync, self.switch = job, sync, switch
        self.models = [seeded(job.model) for _ in range(job.size)]
        self.base: list[torch.Tensor] = []
        self.outer: Optimizer | None = None
        self.since = 0

    def run(self) -> list[Tensors]:
        pairs = [self.job.optimizer(model) for model in self.models]
        x, y = data().tensors
        steps = 0
        for epoch in range(EPOCHS):
            order = torch.tensor(shuffled(COUNT, 0, epoch))
            for batch in range(self.job.shares.steps):
                for rank, model in enumerate(self.models):
                    mine = order[list(self.job.shares.share(batch, rank))]
                    weight = self.job.shares.share_weight(batch, rank)
                    (F.cross_entropy(model(x[mine]), y[mine]) * weight).backward()
                if not self.job.is_step(batch):
                    continue
                self.step(pairs, synchronous=steps < self.switch)
                steps += 1
            if self.since:
                self.meet(over=self.outer is None)
        return [{k: v.clone() for k, v in model.state_dict().items()} for model in self.models]

    @torch.no_grad()
    def step(self, pairs: list[tuple[Optimizer, LambdaLR]], *, synchronous: bool) -> None:
        parameters = [list(model.parameters()) for model in self.models]
        if synchronous:
            for alike in zip(*parameters, strict=True):
                mean = torch.stack([p.grad for p in alike]).mean(0)
                for parameter in alike:
                    parameter.grad.copy_(mean)
        elif not self.base:
            self.base = [p.detach().clone().requires_grad_() for p in parameters[0]]
            if self.sync.momentum:
                self.outer = torch.optim.SGD(self.base, 1.0, self.sync.momentum)
        for optimizer, scheduler in pairs:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.since += not synchronous
        if self.since == self.sync.every:
            self.meet(over=True)

    @torch.no_grad()
    def meet(self, *, over: bool) -> None:
        lists = [list(model.parameters()) for model in self.models]
        for index, alike in enumerate(zip(*lists, strict=True)):
            mean = torch.stack(alike).mean(0)
            self.base[index].grad = self.base[index] - mean
            for parameter in alike:
                parameter.copy_(mean)
        if not over:
            return
        self.since = 0
        if self.outer is not None:
            self.outer.step()
            for model in self.models:
                for parameter, where in zip(model.parameters(), self.base, strict=True):
                    parameter.copy_(where)


def assert_as_simulated(job: Job, sync: PostLocal, switch: int, folder: Path) -> None:
    found = trained(job, sync, folder)
    expected = Simulation(job, sync, switch).run()
    for rank in range(job.size):
        for name, value in expected[rank].items():
            torch.testing.assert_close(
                found[rank][name],
                value,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}",
            )


def phases(folder: Path) -> list[tuple[int, str, int]]:
    """At how many batches, into which phase, with which period."""
    lines = (folder / "world" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["event"] == "sync"]
    return [(r["steps"], r["sync"]["phase"], r["sync"]["period"]) for r in records]


# Synchronous


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("model", [mlp, normed])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_until_the_rate_falls_it_is_allreduce(
    size: int, model: Callable[[], nn.Module], accumulate: int, tmp_path: Path
) -> None:
    job = Job(size, falls_at(), model, accumulate)
    found = trained(job, PostLocal(every=3), tmp_path)
    expected = trained(job, AllReduce(), tmp_path)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_after_it_it_is_not(tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    found, expected = (
        trained(Job(), sync, tmp_path)[0]["0.weight"] for sync in (PostLocal(every=3), AllReduce())
    )
    assert not torch.allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("curve", [falls_at(), lambda step: step / 20, lambda step: 0.0])
def test_a_rate_that_does_not_fall_below(curve: Curve, tmp_path: Path) -> None:
    """Neither constant, nor rising from 0 as in a warm-up, nor 0 all along."""
    trained(Job(2, curve), PostLocal(), tmp_path)
    assert phases(tmp_path) == [(1, "synchronous", 1)]


# Local


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_from_the_first_fall_on_it_is_local_sgd(
    size: int, every: int, momentum: float, tmp_path: Path
) -> None:
    sync = PostLocal(every=every, momentum=momentum)
    assert_as_simulated(Job(size), sync, switch=5, folder=tmp_path)
    assert phases(tmp_path) == [(1, "synchronous", 1), (6, "local", every)]


@pytest.mark.parametrize(
    ("below", "switch"), [(0.5, 3), (0.25, 5), (0.05, 12)], ids=["0.5", "0.25", "never"]
)
def test_how_far_it_must_fall(below: float, switch: int, tmp_path: Path) -> None:
    """The rate is halved with the third step, and again with the fifth."""
    job = Job(2, lambda step: 0.5 ** ((step >= 3) + (step >= 5)))
    assert_as_simulated(job, PostLocal(every=2, below=below), switch, tmp_path)


def test_below_counts_from_the_highest_rate(tmp_path: Path) -> None:
    """Not from the first one, which a warm-up leaves behind."""
    rates = [0.2, 0.6, 1.0, 0.6, 0.4]
    job = Job(2, lambda step: rates[min(step, 4)])
    assert_as_simulated(job, PostLocal(every=2), switch=4, folder=tmp_path)


@pytest.mark.parametrize(("at", "switch"), [(0.0, 0), (0.5, 6), (0.55, 7), (0.99, 12)])
def test_at_a_share_of_the_run(at: float, switch: int, tmp_path: Path) -> None:
    """Of 12 steps, whatever the rate does."""
    assert_as_simulated(Job(2), PostLocal(every=2, at=at), switch, tmp_path)


@pytest.mark.parametrize("switch", [1, 2, 3])
def test_accumulating_before_and_after(switch: int, tmp_path: Path) -> None:
    """3 batches and 1 for the two steps of an epoch."""
    job = Job(3, falls_at(switch), accumulate=3)
    assert_as_simulated(job, PostLocal(every=2), switch, tmp_path)


def test_local_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """Gradients that no rank has shared yet are not shared any more."""
    job = Job(3, falls_at(), accumulate=4)
    # Half of the run is over with the second of the four batches of the second step.
    assert_as_simulated(job, PostLocal(every=2, at=0.5), switch=1, folder=tmp_path)


def test_with_a_codec_what_travels_is_the_way_since_the_switch(tmp_path: Path) -> None:
    """These tensors are so small that they travel as they are."""
    sync = PostLocal(every=2)
    expected = Simulation(Job(2), sync, 5).run()
    found = trained(Job(2), dataclasses.replace(sync, codec="int8"), tmp_path)
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-12, atol=1e-12)


def test_statistics_are_averaged_once_it_is_local(tmp_path: Path) -> None:
    ends = trained(Job(3, falls_at(2), normed), PostLocal(every=2), tmp_path)
    assert all(torch.equal(end["1.running_mean"], ends[0]["1.running_mean"]) for end in ends)
    synchronous = trained(Job(3, falls_at(), normed), PostLocal(every=2), tmp_path)
    for end in synchronous:  # before, they are rank 0's
        assert torch.equal(end["1.running_mean"], synchronous[0]["1.running_mean"])
    assert not torch.allclose(ends[0]["1.running_mean"], synchronous[0]["1.running_mean"])


# What is not finite


@pytest.mark.filterwarnings("ignore:rank 1, step 8")
@pytest.mark.parametrize(
    ("at", "message"),
    [
        (2, "rank 1, step 3: its gradient of .*2.bias"),
        (7, "rank 1, step 8: its gradient of '2.bias' is not finite"),
    ],
    ids=["synchronous", "local"],
)
def test_a_gradient_that_is_not_finite_stops_all(at: int, message: str, tmp_path: Path) -> None:
    """The rate falls after 4 steps; the fifth shows it, and the ranks meet after three more."""

    def body(run: Run) -> Any:
        model = seeded(mlp)
        optimizer, scheduler = Job(curve=falls_at(4)).optimizer(model)
        wrapped, _ = run.distribute(model, optimizer)
        x, y = data().tensors

        def steps() -> None:
            for step in range(12):
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                if step == at and run.rank == 1:
                    loss = loss + model[2].bias[0] * torch.inf
                loss.backward()
                optimizer.step()
                scheduler.step()

        with pytest.raises(DivergedError, match=message):
            steps()
        return [parameter.isfinite().all().item() for parameter in model.parameters()]

    sync = PostLocal(every=3)
    for finite in run_world(2, body, folder=tmp_path, sync=sync, timeout=timedelta(seconds=20)):
        assert all(finite)

"""Lagged all-reduce against a plain simulation of it: every gradient once, one step late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.errors import DivergedError, UserError
from farandole.sync import AllReduce, Lagged, parse
from farandole.testing import run_world
from farandole.train import Run

COUNT, BATCH, EPOCHS = 43, 8, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 2, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def network() -> nn.Module:
    """With a convolution in channels-last order, whose gradients lie differently in a bucket."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return model.to(memory_format=torch.channels_last)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def train(run: Run) -> list[torch.Tensor]:
    model, source = network(), data()
    wrapped, optimizer = run.distribute(model, optimizer_of(model))
    for _ in run.epochs(EPOCHS):
        for x, y in run.loader(source, global_batch_size=BATCH, shuffle=False):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            assert run.check_in_step(wrapped), "lagged ranks are always in step"
    return [parameter.detach().clone() for parameter in model.parameters()]


def simulated(lagged: Lagged, size: int) -> list[torch.Tensor]:
    model = network()
    optimizer = optimizer_of(model)
    shares = Shares(COUNT, size, BATCH)
    x, y = data().tensors
    late: list[torch.Tensor] | None = None
    passes = 0
    for epoch in range(EPOCHS):
        for step in range(shares.steps):
            progress = (epoch + step / shares.steps) / EPOCHS
            lags = passes >= lagged.steps and lagged.first <= progress < 1 - lagged.last
            batch = list(shares.global_range(step))
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            for index, p in enumerate(model.parameters()):
                if lags:
                    p.grad = None if late is None else late[index]
                elif late is not None:
                    p.grad = mine[index] + late[index]
            late = mine if lags else None
            passes += 1
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@settings(max_examples=10)
@given(
    size=st.integers(2, 4),
    first=st.sampled_from([0.0, 0.2, 0.6]),
    last=st.sampled_from([0.0, 0.3]),
    steps=st.sampled_from([0, 1, 5, 100]),
)
def test_each_gradient_is_applied_once_and_late(
    tmp_path_factory: pytest.TempPathFactory, size: int, first: float, last: float, steps: int
) -> None:
    lagged = Lagged(first=first, last=last, steps=steps)
    found = run_world(size, train, folder=tmp_path_factory.mktemp("lagged"), sync=lagged)
    for rank in found:
        for value, wanted in zip(rank, simulated(lagged, size), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


def test_it_is_all_reduce_until_it_lags(tmp_path: Path) -> None:
    ours = run_world(2, train, folder=tmp_path / "a", sync=Lagged(steps=1000))
    theirs = run_world(2, train, folder=tmp_path / "b", sync=AllReduce())
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_alone_it_is_plain_training(tmp_path: Path) -> None:
    (ours,) = run_world(1, train, folder=tmp_path / "a", sync=Lagged(steps=0, first=0.0))
    (theirs,) = run_world(1, train, folder=tmp_path / "b", sync=AllReduce())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_phases_are_noted(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        train(run)
        run.log(loss=1.0)

    run_world(2, body, folder=tmp_path, sync=Lagged(steps=2, first=0.3, last=0.3))
    lines = (tmp_path / "world" / "metrics.jsonl").read_text().splitlines()
    phases = [line.split('"phase": "')[1].split('"')[0] for line in lines if "phase" in line]
    assert phases == ["synchronous", "lagged", "synchronous"]


@pytest.mark.parametrize("steps", [0, 100])
def test_a_gradient_that_is_not_finite_names_its_rank(tmp_path: Path, steps: int) -> None:
    models: dict[int, nn.Module] = {}

    def body(run: Run) -> None:
        models[run.rank], source = network(), data()
        wrapped, optimizer = run.distribute(models[run.rank], optimizer_of(models[run.rank]))
        for step, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
            if run.rank == 2 and step == 1:
                x = x / 0
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()

    with pytest.raises(DivergedError, match=r"rank 2, step [23]: its gradient of '"):
        run_world(3, body, folder=tmp_path, sync=Lagged(steps=steps, first=0.0))
    for model in models.values():
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_gradient_scaler_skips_what_is_not_finite(tmp_path: Path) -> None:
    """Its infinities are no accident, and all ranks skip the same steps."""

    def body(run: Run) -> bool:
        model, source = network().float(), data()
        wrapped, optimizer = run.distribute(model, optimizer_of(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
            x = x.float() / (0.0 if run.rank == 1 and step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(wrapped(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        return finite and bool(run.check_in_step(wrapped))

    assert run_world(2, body, folder=tmp_path, sync=Lagged(steps=1, first=0.0)) == [True, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lagged:first=1", "first=1 must be a share"),
        ("lagged:last=-0.1", "last=-0.1 must be a share"),
        ("lagged:steps=-1", "steps=-1 must be at least 0"),
        ("lagged:frist=0.1", "Did you mean 'first'"),
    ],
)
def test_options_that_cannot_work(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(text)


def test_it_needs_the_optimizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.distribute\(model, opt\)"):
        run_world(2, lambda run: run.distribute(nn.Linear(2, 2)), folder=tmp_path, sync=Lagged())

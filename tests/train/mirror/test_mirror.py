"""Weights that are trained elsewhere, here by hand, are kept in step as torch's are."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train.mirror.mirror import Mirror
from farandole.train.mirror.rules import read_strategy
from farandole.train.run import Run
from farandole.train.settings import Settings

STEPS = 7


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def gradients(weights: list[torch.Tensor], rank: int, step: int) -> list[torch.Tensor]:
    """Of a linear model, as another framework would compute them."""
    x, y = batch(rank, step)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    loss = ((x @ leaves[0].T + leaves[1] - y) ** 2).mean()
    return list(torch.autograd.grad(loss, leaves))


def start(rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return {
        "dense/kernel.0": torch.randn(1, 3, generator=draw, dtype=torch.float64),
        "dense/bias": torch.zeros(1, dtype=torch.float64),
    }


def elsewhere(run: Run, sync: str) -> list[torch.Tensor]:
    mirror = Mirror(run, parse(sync), start(run.rank), rate=0.1)
    weights = [value.clone() for value in mirror.values()]
    for step in range(STEPS):
        run.other_loop.batch(4, step, STEPS)
        applied = mirror.gradients(gradients(weights, run.rank, step))
        weights = [w - 0.1 * g for w, g in zip(weights, applied, strict=True)]
        mirror.step(weights)
        weights = [value.clone() for value in mirror.values()]
    return weights


def torch_itself(run: Run, sync: str) -> list[torch.Tensor]:
    model = nn.Linear(3, 1).double()
    given = start(run.rank)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), given.values(), strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.distribute(model, optimizer, sync=parse(sync))
    for step in range(STEPS):
        run.other_loop.batch(4, step, STEPS)
        x, y = batch(run.rank, step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "sync",
    [
        "allreduce",
        "allreduce:codec=int8",
        "lagged:steps=2",
        "local:every=3",
        "local:every=3,momentum=0.5",
        "diloco:every=3",
        "federated:every=2",
        "postlocal:every=2,at=0.5",
    ],
)
def test_the_same_weights_as_torchs(sync: str, tmp_path: Path) -> None:
    ours = run_world(2, lambda run: elsewhere(run, sync), folder=tmp_path / "a")
    theirs = run_world(2, lambda run: torch_itself(run, sync), folder=tmp_path / "b")
    for mine, its in zip(ours, theirs, strict=True):
        for one, other in zip(mine, its, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_statistics_are_averaged_and_constants_are_not(tmp_path: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        mirror = Mirror(
            run,
            parse("local:every=1"),
            {"w": torch.zeros(2)},
            frozen={"n": torch.zeros(1, dtype=torch.int64)},
            statistics={"mean": torch.zeros(2)},
        )
        mirror.values()
        here = float(run.rank)
        given = [torch.full((2,), here), torch.tensor([run.rank]), torch.full((2,), 2 * here)]
        mirror.step(given)
        return [value.clone() for value in mirror.values()]

    for rank, (weight, constant, mean) in enumerate(run_world(2, body, folder=tmp_path)):
        assert weight.tolist() == [0.5, 0.5]
        assert constant.tolist() == [rank]
        assert mean.tolist() == [1.0, 1.0]


def test_a_gradient_that_is_missing_counts_as_zeros(tmp_path: Path) -> None:
    def body(run: Run) -> list[list[float]]:
        mirror = Mirror(run, fd.AllReduce(), {"a": torch.zeros(1), "b": torch.zeros(1)})
        mirror.values()
        one = torch.ones(1)
        return [g.tolist() for g in mirror.gradients([one, one if run.rank else None])]

    assert run_world(2, body, folder=tmp_path) == [[[1.0], [0.5]]] * 2


def test_wrong_gradients_are_named(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        mirror = Mirror(run, fd.AllReduce(), {"a": torch.zeros(2), "b": torch.zeros(1)})
        mirror.values()
        with pytest.raises(fd.UserError, match="1 gradients were given for 2"):
            mirror.gradients([torch.zeros(2)])
        with pytest.raises(fd.UserError, match=r"'a' is \(3,\), and the weight is \(2,\)"):
            mirror.gradients([torch.zeros(3), None])
        for weights, words in (({}, "no weights"), ({"a.b": None, "a:b": None}, "two weights")):
            given = {name: torch.zeros(1) for name in weights}
            with pytest.raises(fd.UserError, match=words):
                Mirror(run, fd.AllReduce(), given)

    run_world(1, body, folder=tmp_path)


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("hogwild", "share the memory"),
        ("server", "parameter servers"),
        ("downpour", "parameter servers"),
        ("allreduce:batchnorm=sync", "replaces layers"),
        ("local:moments=reset", "counters"),
        ("local:moments=average", "state of the optimizer"),
        ("daso", "state of the optimizer"),
    ],
)
def test_what_needs_a_torch_model_is_refused(sync: str, words: str) -> None:
    with pytest.raises(fd.UserError, match=words):
        read_strategy(Settings(), sync, "JAX", slots=False)


def test_the_command_line_wins() -> None:
    assert read_strategy(Settings(sync=fd.Local(4)), "allreduce", "JAX") == fd.Local(4)
    assert read_strategy(Settings(), None, "JAX") == fd.AllReduce()
    with pytest.raises(fd.UserError, match="--layout"):
        read_strategy(Settings(layout=fd.Layout(stages=2)), None, "JAX")


def test_a_missing_framework_is_named_with_what_to_install() -> None:
    if find_spec("jax") is not None:
        pytest.skip("JAX is installed here")
    with pytest.raises(fd.UserError, match=r"pip install 'farandole\[jax\]'"):
        _ = fd.jax

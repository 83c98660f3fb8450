"""Flat copies of a model, the average of all ranks' models, and the step of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from farandole.comm.codecs import parse
from farandole.sync import Local
from farandole.sync.common.flat import Flat, is_finite, moments_of, statistics_of, weights_of
from farandole.sync.periodic.average import ModelAverage
from farandole.sync.periodic.outer import Outer, OuterRule
from farandole.testing import run_world
from farandole.train import Run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


def tensors(kinds: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    """Each with numbers of its own, from 1 on."""
    made, begin = {}, 1
    for index, (dtype, shape) in enumerate(kinds):
        count = torch.Size(shape).numel()
        made[str(index)] = torch.arange(begin, begin + count).view(shape).to(dtype)
        begin += count
    return made


# Flat


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6
    )
)
def test_what_was_gathered_comes_back(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    originals, own = tensors(kinds), tensors(kinds)
    flat = Flat(own)
    flat.gather()
    assert len(flat.buffers) == len({b.dtype for b in flat.buffers})
    for tensor in own.values():
        tensor.zero_()
    for buffer in flat.buffers:
        buffer.mul_(2)
    flat.scatter()
    for name, original in originals.items():
        assert torch.equal(own[name], original * 2), name


def test_any_layout_in_memory() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    turned = torch.arange(6.0).view(2, 3).T
    flat = Flat({"image": image, "turned": turned})
    flat.gather()
    assert flat.buffers[0].tolist() == [*range(24), 0, 3, 1, 4, 2, 5]
    flat.buffers[0].neg_()
    flat.scatter()
    assert torch.equal(image, -torch.arange(24.0).view(1, 2, 3, 4))
    assert torch.equal(turned, -torch.arange(6.0).view(2, 3).T)


def test_it_holds_these_very_tensors() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    flat = Flat(own)
    assert flat.holds(own)
    assert not flat.holds({"a": own["a"]})
    assert not flat.holds({"a": own["a"], "c": own["b"]})
    assert not flat.holds({"a": own["a"], "b": torch.zeros(3)})
    own["b"].data = torch.zeros(4)
    assert not flat.holds(own)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["first", "turn"])
def test_the_one_that_is_not_finite(bad: float, place: str) -> None:
    own = {
        "first": torch.ones(2),
        "nothing": torch.ones(0),
        "turn": torch.ones(2, dtype=torch.complex64),
    }
    flat = Flat(own)
    flat.gather()
    assert flat.is_finite()
    assert flat.first_not_finite() is None
    own[place][1] = bad
    flat.gather()
    assert not flat.is_finite()
    assert flat.first_not_finite() == place


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert is_finite(torch.full((100,), 1e37))
    assert is_finite(torch.full((100,), 6e4, dtype=torch.float16))
    assert not is_finite(torch.tensor([1e37, -torch.inf]))
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]))


# What is in a model and its optimizer


def test_weights_are_what_is_trained_or_once_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    assert list(weights_of(model)) == ["1.weight"]
    assert list(weights_of(model, known=["0.bias"])) == ["0.bias", "1.weight"]


def test_statistics_are_those_of_normalising_layers() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)
    )
    model.register_buffer("mask", torch.ones(2))
    assert list(statistics_of(model)) == ["0.running_mean", "0.running_var"]
    assert list(statistics_of(nn.BatchNorm1d(2))) == ["running_mean", "running_var"]
    assert statistics_of(nn.Linear(2, 2)) == {}


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], list[str]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), []),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), ["momentum_buffer"]),
    "adam": (lambda p: torch.optim.Adam(p, 0.1), ["exp_avg", "exp_avg_sq"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_all_but_counters(name: str) -> None:
    """Of a matrix, of complex numbers, and of a single number, which looks like a counter."""
    make, kinds = OPTIMIZERS[name]
    parameters = [
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        nn.Parameter(torch.tensor(1.0)),
    ]
    optimizer = make(parameters)
    assert moments_of(optimizer) == {}
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert list(moments_of(optimizer)) == [f"{i}.{kind}" for i in range(3) for kind in kinds]


# The average of models


class Shared(nn.Module):
    """One layer under two names, an odd number of real ones before complex ones, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.zeros(3))
        self.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(2)
        self.again = self.norm
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def test_the_whole_model_is_the_average_of_all_and_changes_none(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        model = Shared()
        average = ModelAverage(model, torch.optim.SGD(model.parameters(), 0.1), run.group)
        with torch.no_grad():
            model.single.fill_(run.rank)
            model.turn.fill_(complex(run.rank, 1))
            model.norm.weight.fill_(3 * run.rank)
            model.norm.running_mean.fill_(6 * run.rank)
            model.frozen.fill_(7)
        whole = average.whole_model()
        return whole, model.state_dict()

    for rank, (whole, own) in enumerate(run_world(3, body, folder=tmp_path)):
        assert whole.keys() == own.keys()
        assert whole["single"].tolist() == [1, 1, 1]
        assert whole["turn"].tolist() == [1 + 1j, 1 + 1j]
        assert whole["frozen"].tolist() == [7, 7]
        for name in ("norm", "again"):
            assert whole[f"{name}.weight"].tolist() == [3, 3]
            assert whole[f"{name}.running_mean"].tolist() == [6, 6]
        assert whole["_extra_state"] == {"version": 3}
        assert own["single"].tolist() == [rank] * 3
        assert own["turn"].tolist() == [complex(rank, 1)] * 2
        assert own["again.running_mean"].tolist() == [6 * rank] * 2
        Shared().load_state_dict(whole)


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (0.0, 1.0, 0.0)])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_an_average_by_weight(weights: tuple[float, ...], codec: Any, tmp_path: Path) -> None:
    def body(run: Run) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2, affine=False))
        with torch.no_grad():
            model[0].weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = ModelAverage(model, optimizer, run.group, parse(codec) if codec else None)
        value = 4.0 * (run.rank + 1)
        with torch.no_grad():
            model[0].weight.fill_(value)
            model[1].running_mean.fill_(value)
        if weights[run.rank] == 0:
            model[1].running_mean.fill_(torch.nan)  # nobody asks a rank that does not count
        assert average.gather() is None
        average.average(weights[run.rank])
        average.scatter()
        return [model[0].weight.flatten().tolist(), model[1].running_mean.tolist()]

    expected = sum(weight * 4.0 * (rank + 1) for rank, weight in enumerate(weights))
    for found in run_world(3, body, folder=tmp_path):
        assert found == [[expected] * 2] * 2


def test_unlike_moments_are_not_averaged(tmp_path: Path) -> None:
    """Each rank has trained another branch: their moments have one size and different names."""

    def body(run: Run) -> tuple[list[int], list[float]]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        run.distribute(model, optimizer, sync=Local(every=1, moments="average"))
        model[run.rank](torch.full((1, 1), run.rank + 1.0)).sum().backward()
        optimizer.step()
        moments = optimizer.state_dict()["state"]
        return list(moments), [state["momentum_buffer"].item() for state in moments.values()]

    assert run_world(2, body, folder=tmp_path) == [([0], [1.0]), ([1], [2.0])]


# The outer optimizer


@pytest.mark.parametrize("nesterov", [False, True])
@given(rate=st.floats(0.1, 2), momentum=st.floats(0.05, 0.95))
def test_the_outer_step_is_sgd_s(nesterov: bool, rate: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    base = [torch.randn(3, generator=generator, dtype=torch.float64)]
    expected = [base[0].clone().requires_grad_()]
    sgd = torch.optim.SGD(expected, rate, momentum, nesterov=nesterov)
    outer = Outer(OuterRule(rate, momentum, nesterov))
    for _ in range(4):
        arrived = torch.randn(3, generator=generator, dtype=torch.float64)
        before = arrived.clone()
        expected[0].grad = expected[0].detach() - arrived
        sgd.step()
        outer.step(base, [arrived])
        torch.testing.assert_close(base[0], expected[0].detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(arrived, before)


def test_without_rate_and_momentum_it_is_the_average() -> None:
    base = [torch.tensor([1.0, 2.0])]
    Outer(OuterRule(1.0, 0.0, nesterov=False)).step(base, [torch.tensor([5.0, 7.0])])
    assert base[0].tolist() == [5, 7]


def test_a_restored_outer_optimizer_goes_on() -> None:
    def step(outer: Outer, base: torch.Tensor) -> None:
        outer.step([base], [base + 1])

    outer, base = Outer(OuterRule(0.7, 0.9, nesterov=True)), torch.zeros(2)
    step(outer, base)
    other, copy = Outer(OuterRule(0.7, 0.9, nesterov=True)), base.clone()
    other.load_state_dict(outer.state_dict())
    step(outer, base)
    step(other, copy)
    assert torch.equal(base, copy)
    other.load_state_dict(Outer(OuterRule(0.7, 0.9, nesterov=True)).state_dict())  # forgets
    step(other, copy)
    step(outer, base)
    assert not torch.equal(base, copy)


def test_a_velocity_from_a_checkpoint_goes_to_the_device_of_the_model() -> None:
    """It is read into memory of the host."""
    outer = Outer(OuterRule(0.7, 0.9, nesterov=True))
    outer.load_state_dict({"velocity": [torch.ones(3)]})
    base = torch.zeros(3, device="meta")
    outer.step([base], [torch.zeros(3, device="meta")])
    (velocity,) = outer.state_dict()["velocity"]
    assert velocity.device.type == "meta"

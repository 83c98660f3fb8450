"""LARS against its formula written out by hand, and on a problem that it has to solve."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.optim import LargeBatch, Lars

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


class ReferenceLayer:
    """One layer under LARS in plain Python floats; its weights, gradient and buffer are lists."""

    def __init__(self, weights: torch.Tensor, is_adapted: bool) -> None:
        self.weights = weights.flatten().tolist()
        self.buffer = [0.0] * len(self.weights)
        self.is_adapted = is_adapted

    def step(
        self,
        gradient: list[float],
        rate: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        trust_coefficient: float = 0.02,
        eps: float = 1e-3,
    ) -> None:
        ratio, decay = 1.0, 0.0
        if self.is_adapted:
            decay = weight_decay
            weight_norm = norm(self.weights)
            ratio = trust_coefficient * weight_norm / (norm(gradient) + decay * weight_norm + eps)
        for i, slope in enumerate(gradient):
            update = ratio * (slope + decay * self.weights[i])
            self.buffer[i] = momentum * self.buffer[i] + update
            direction = update + momentum * self.buffer[i] if nesterov else self.buffer[i]
            self.weights[i] -= rate * direction


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("exclude_1d", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_lars_follows_the_formula(
    device: str, exclude_1d: bool, momentum: float, nesterov: bool, weight_decay: float
) -> None:
    torch.manual_seed(3)
    shapes = [(4, 3), (5,), (2, 3, 2), ()]
    params = [
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in shapes
    ]
    layers = [ReferenceLayer(p.detach(), p.ndim > 1 or not exclude_1d) for p in params]
    optimizer = Lars(
        params,
        lr=0.5,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        exclude_1d=exclude_1d,
        trust_coefficient=0.02,
        eps=1e-3,
    )
    for step in range(12):
        rate = optimizer.param_groups[0]["lr"] = 0.5 / (1 + step)
        for param, layer in zip(params, layers, strict=True):
            param.grad = torch.randn_like(param)
            layer.step(param.grad.flatten().tolist(), rate, momentum, weight_decay, nesterov)
        optimizer.step()
        for param, layer in zip(params, layers, strict=True):
            assert param.flatten().tolist() == pytest.approx(layer.weights, rel=1e-12, abs=1e-14)


def test_lars_is_the_papers_update_with_momentum_correction() -> None:
    """The paper's form, v = m v + rate * ratio * (g + decay * w), corrected at each new rate."""
    torch.manual_seed(5)
    param = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights, velocity = param.detach().clone(), torch.zeros_like(param)
    optimizer = Lars([param], lr=1.0, momentum=0.8, weight_decay=0.1, trust_coefficient=0.05, eps=0)
    old_rate = 1.0
    for rate in (1.0, 2.0, 4.0, 0.4, 0.4, 0.04):
        param.grad = torch.randn_like(param)
        ratio = 0.05 * weights.norm() / (param.grad.norm() + 0.1 * weights.norm())
        velocity = 0.8 * (rate / old_rate) * velocity + rate * ratio * (param.grad + 0.1 * weights)
        weights -= velocity
        old_rate = optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        torch.testing.assert_close(param.detach(), weights, rtol=1e-12, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_the_step_of_a_layer_does_not_depend_on_the_size_of_its_gradient(
    scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    gradient = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    after = []
    for grad in (gradient, scale * gradient):
        param = start.clone().requires_grad_()
        param.grad = grad
        Lars([param], lr=2.0, momentum=0.0, trust_coefficient=0.01, eps=0.0).step()
        after.append(param.detach())
    torch.testing.assert_close(after[0], after[1], rtol=1e-12, atol=0)
    moved = (after[0] - start).norm() / start.norm()
    assert moved.item() == pytest.approx(2.0 * 0.01)


def test_layers_without_weights_or_gradient_stay_finite() -> None:
    zero_weights = torch.zeros(2, 2, requires_grad=True)
    zero_weights.grad = torch.ones(2, 2)
    zero_gradient = torch.ones(2, 2, requires_grad=True)
    zero_gradient.grad = torch.zeros(2, 2)
    untouched = torch.ones(2, 2, requires_grad=True)
    Lars([zero_weights, zero_gradient, untouched], lr=0.5, eps=0.0).step()
    assert zero_weights.tolist() == [[-0.5, -0.5], [-0.5, -0.5]]
    assert zero_gradient.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert untouched.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_half_precision_norms_do_not_overflow() -> None:
    param = torch.full((64, 64), 30.0, dtype=torch.float16, requires_grad=True)
    param.grad = torch.full((64, 64), 3000.0, dtype=torch.float16)  # norm 192,000, limit 65,504
    Lars([param], lr=1.0, momentum=0.0, trust_coefficient=0.1).step()
    assert param.dtype is torch.float16
    torch.testing.assert_close(param.detach(), torch.full_like(param, 27.0))


def test_mixed_dtypes_are_updated_as_they_would_be_alone() -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    together = [torch.randn(3, 3).to(dtype).requires_grad_() for dtype in dtypes]
    alone = copy.deepcopy(together)
    for a, b in zip(together, alone, strict=True):
        a.grad = torch.ones_like(a)
        b.grad = torch.ones_like(b)
        Lars([b], lr=1.0, trust_coefficient=0.1).step()
    Lars(together, lr=1.0, trust_coefficient=0.1).step()
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


def make_network() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(11)
    inputs = torch.randn(256, 8)
    labels = (inputs @ torch.randn(8, 3)).argmax(dim=1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
    )
    # A badly scaled layer: its gradient is large and its weights are small.
    with torch.no_grad():
        model[0].weight.mul_(0.01)
    return model, inputs, labels


def test_lars_converges_under_the_recipe() -> None:
    model, inputs, labels = make_network()
    optimizer = Lars(model.parameters(), lr=1.0, weight_decay=1e-4, trust_coefficient=0.02)
    recipe = LargeBatch(0.25, 64, warmup_epochs=10, decay="polynomial")
    scheduler = recipe.apply(optimizer, global_batch=256, steps_per_epoch=1, epochs=150)
    first = F.cross_entropy(model(inputs), labels).item()
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
    last = F.cross_entropy(model(inputs), labels).item()
    accuracy = (model(inputs).argmax(dim=1) == labels).float().mean().item()
    assert first > 0.9
    assert last < 0.1
    assert accuracy > 0.97


def test_state_survives_a_checkpoint_bit_for_bit() -> None:
    def step(model: torch.nn.Module, optimizer: Lars) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    model, inputs, labels = make_network()
    optimizer = Lars(model.parameters(), lr=0.5, weight_decay=1e-4)
    for _ in range(3):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    resumed = copy.deepcopy(model)
    resumed_optimizer = Lars(resumed.parameters(), lr=99.0)
    resumed_optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for _ in range(3):
        step(model, optimizer)
        step(resumed, resumed_optimizer)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_settings_can_differ_by_group() -> None:
    adapted = torch.ones(2, 2, requires_grad=True)
    gentler = torch.ones(2, 2, requires_grad=True)
    optimizer = Lars(
        [{"params": [adapted]}, {"params": [gentler], "trust_coefficient": 0.05}],
        lr=1.0,
        trust_coefficient=0.1,
        eps=0.0,
    )
    for param in (adapted, gentler):
        param.grad = torch.ones(2, 2)
    optimizer.step()
    assert adapted.mean().item() == pytest.approx(0.9)
    assert gentler.mean().item() == pytest.approx(0.95)


def test_closure_is_called_with_gradients_enabled() -> None:
    param = torch.ones(2, 2, requires_grad=True)
    optimizer = Lars([param], lr=1.0, trust_coefficient=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert param.mean().item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"trust_coefficient": 0.0}, "trust_coefficient=0.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True needs momentum"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    param = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(UserError, match=message):
        Lars([param], **{"lr": 0.1, **arguments})
    with pytest.raises(UserError, match=message):
        Lars([{"params": [param], **arguments}], lr=0.1)


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"sparse gradient for a parameter of shape \(5, 3\)"):
        Lars(embedding.parameters(), lr=0.1).step()

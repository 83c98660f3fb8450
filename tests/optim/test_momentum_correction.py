"""Momentum correction, against both forms of momentum SGD written out by hand in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from farandole.errors import UserError
from farandole.optim import LargeBatch, Lars, RateScheduler, StepDecay, rescale_momentum

MOMENTUM = 0.9
CURVATURES = (1.0, 0.3, 4.0)
START = (2.0, -1.0, 0.5)
STEPS = 60
# The rate rises sixteenfold in the warm-up and then falls tenfold, twice.
RECIPE = LargeBatch(0.002, 8, warmup_epochs=2, decay=StepDecay((4, 5), 0.1))
TRAINING = {"global_batch": 128, "steps_per_epoch": 10, "epochs": 6}


class AbsorbedSGD(torch.optim.Optimizer):
    """Momentum SGD with the rate inside the buffer: v = m v + r g; w = w - v."""

    def __init__(
        self, params: list[torch.Tensor], lr: float, weight_decay: float, nesterov: bool
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                step = group["lr"] * (param.grad + group["weight_decay"] * param)
                state["velocity"] = MOMENTUM * state.get("velocity", torch.zeros_like(param)) + step
                if group["nesterov"]:
                    param.sub_(step + MOMENTUM * state["velocity"])
                else:
                    param.sub_(state["velocity"])


def reference(weight_decay: float, nesterov: bool) -> list[list[float]]:
    """The trajectory with the rate outside the buffer, in plain Python floats."""
    rate_at = RECIPE.schedule(**TRAINING)
    weights, buffers = list(START), [0.0] * len(START)
    trajectory = []
    for step in range(STEPS):
        for i, curvature in enumerate(CURVATURES):
            gradient = curvature * weights[i] + weight_decay * weights[i]
            buffers[i] = MOMENTUM * buffers[i] + gradient
            direction = gradient + MOMENTUM * buffers[i] if nesterov else buffers[i]
            weights[i] -= rate_at(step) * direction
        trajectory.append(list(weights))
    return trajectory


def trajectory_of(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], rate_absorbed_by: str | None
) -> list[list[float]]:
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    curvatures = torch.tensor(CURVATURES, dtype=torch.float64)
    optimizer = make([weights])
    scheduler = RECIPE.apply(optimizer, **TRAINING, rate_absorbed_by=rate_absorbed_by)
    trajectory = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * curvatures * weights**2).sum().backward()
        optimizer.step()
        scheduler.step()
        trajectory.append(weights.tolist())
    return trajectory


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    return (torch.tensor(a).double() - torch.tensor(b).double()).abs().max().item()


both_settings = pytest.mark.parametrize(
    ("weight_decay", "nesterov"), [(0.0, False), (0.05, False), (0.0, True), (0.05, True)]
)


@both_settings
def test_torch_sgd_needs_no_correction(weight_decay: float, nesterov: bool) -> None:
    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=0.002, momentum=MOMENTUM, weight_decay=weight_decay, nesterov=nesterov
        )

    expected = reference(weight_decay, nesterov)
    assert distance(trajectory_of(make, None), expected) < 1e-12


@both_settings
def test_absorbed_form_follows_the_same_trajectory_once_corrected(
    weight_decay: float, nesterov: bool
) -> None:
    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return AbsorbedSGD(params, 0.002, weight_decay, nesterov)

    expected = reference(weight_decay, nesterov)
    assert distance(trajectory_of(make, "velocity"), expected) < 1e-12
    assert distance(trajectory_of(make, None), expected) > 0.01


@pytest.mark.parametrize("order", ["ALS", "ASL", "LAS"])
@pytest.mark.parametrize("stop", [3, 17, 41])
def test_resuming_an_absorbed_optimizer_keeps_the_trajectory(order: str, stop: int) -> None:
    """Whatever the order: Apply the recipe, Load the optimizer, load the Scheduler."""
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    curvatures = torch.tensor(CURVATURES, dtype=torch.float64)

    def train(
        optimizer: torch.optim.Optimizer, scheduler: RateScheduler, steps: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        for _ in range(steps):
            optimizer.zero_grad()
            (0.5 * curvatures * weights**2).sum().backward()
            optimizer.step()
            scheduler.step()
        return optimizer.state_dict(), scheduler.state_dict()

    def apply(optimizer: torch.optim.Optimizer) -> RateScheduler:
        return RECIPE.apply(optimizer, **TRAINING, rate_absorbed_by="velocity")

    optimizer = AbsorbedSGD([weights], 0.002, 0.0, False)
    optimizer_state, position = train(optimizer, apply(optimizer), stop)

    resumed = AbsorbedSGD([weights], 0.002, 0.0, False)
    if order == "LAS":
        resumed.load_state_dict(optimizer_state)
    scheduler = apply(resumed)
    if order == "ALS":
        resumed.load_state_dict(optimizer_state)
    scheduler.load_state_dict(position)
    if order == "ASL":
        resumed.load_state_dict(optimizer_state)
    train(resumed, scheduler, STEPS - stop)
    assert distance([weights.tolist()], [reference(0.0, False)[-1]]) < 1e-12


def test_each_group_is_rescaled_by_its_own_ratio() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    idle = torch.ones(1, requires_grad=True)
    optimizer = AbsorbedSGD([first], 0.1, 0.0, False)
    optimizer.add_param_group({"params": [second, idle]})
    optimizer.state[first]["velocity"] = torch.full((2,), 3.0)
    optimizer.state[second]["velocity"] = torch.full((3,), 5.0)
    rescale_momentum(optimizer, [0.5, 0.25], [1.0, 0.0], "velocity")
    assert optimizer.state[first]["velocity"].tolist() == [6.0, 6.0]
    assert optimizer.state[second]["velocity"].tolist() == [0.0, 0.0, 0.0]
    optimizer.state[second]["velocity"].fill_(7.0)  # not v = r u at rate 0, so not to be kept
    rescale_momentum(optimizer, [1.0, 0.0], [1.0, 0.5], "velocity")
    assert optimizer.state[first]["velocity"].tolist() == [6.0, 6.0]
    assert optimizer.state[second]["velocity"].tolist() == [0.0, 0.0, 0.0]
    assert idle not in optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, Lars])
def test_correcting_an_optimizer_that_needs_none_is_refused(
    kind: type[torch.optim.Optimizer],
) -> None:
    optimizer = kind([torch.ones(2, requires_grad=True)], lr=0.1)
    with pytest.raises(UserError, match=f"{kind.__name__} multiplies by the rate after"):
        RECIPE.apply(optimizer, **TRAINING, rate_absorbed_by="momentum_buffer")
    with pytest.raises(UserError, match="Leave out rate_absorbed_by"):
        rescale_momentum(optimizer, [0.1], [0.2])


def test_a_buffer_that_does_not_exist_is_refused() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = AbsorbedSGD([param], 0.1, 0.0, False)
    optimizer.state[param]["velocity"] = torch.ones(2)
    with pytest.raises(UserError, match=r"no 'momentum_buffer'.*\['velocity'\]"):
        rescale_momentum(optimizer, [0.1], [0.2])

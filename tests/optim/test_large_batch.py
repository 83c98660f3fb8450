"""The recipe: the scaled rate, the curve, and the scheduler that follows it."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.optim import (
    ConstantDecay,
    CosineDecay,
    LargeBatch,
    PolynomialDecay,
    RateScheduler,
    StepDecay,
)


def test_linear_rule_gives_the_figures_of_the_paper() -> None:
    recipe = LargeBatch(base_rate=0.1, base_batch=256)
    assert recipe.rate(256) == 0.1
    assert recipe.rate(8192) == 3.2
    assert recipe.rate(64) == 0.025


def test_other_rules() -> None:
    assert LargeBatch(0.1, 256, rule="sqrt").rate(1024) == 0.2
    assert LargeBatch(0.1, 256, rule="none").rate(8192) == 0.1


@settings(max_examples=60, deadline=None)
@given(
    base_rate=st.floats(1e-4, 10.0),
    base_batch=st.integers(1, 512),
    times=st.integers(1, 300),
    warmup_epochs=st.integers(0, 6),
    steps_per_epoch=st.integers(1, 40),
    decay=st.sampled_from(["cosine", "polynomial", "constant"]),
)
def test_warmup_rises_from_the_base_rate_to_the_scaled_rate(
    base_rate: float,
    base_batch: int,
    times: int,
    warmup_epochs: int,
    steps_per_epoch: int,
    decay: str,
) -> None:
    recipe = LargeBatch(base_rate, base_batch, warmup_epochs=warmup_epochs, decay=decay)
    curve = recipe.schedule(times * base_batch, steps_per_epoch, epochs=warmup_epochs + 3)
    warmup_steps = warmup_epochs * steps_per_epoch
    rates = [curve(step) for step in range(warmup_steps + 1)]
    if warmup_epochs > 0:
        assert rates[0] == base_rate
    assert rates[-1] == base_rate * times
    if times > 1:
        assert all(low < high for low, high in itertools.pairwise(rates))
        gains = [high - low for low, high in itertools.pairwise(rates)]
        assert gains == pytest.approx([gains[0]] * len(gains) if gains else [], rel=1e-6)
    after = [curve(step) for step in range(warmup_steps, warmup_steps + 3 * steps_per_epoch + 2)]
    assert all(high >= low >= 0 for high, low in itertools.pairwise(after))


@pytest.mark.parametrize("global_batch", [16, 64, 256])
def test_warmup_holds_the_scaled_rate_when_there_is_nothing_to_climb(global_batch: int) -> None:
    recipe = LargeBatch(0.1, 256, warmup_epochs=2)
    curve = recipe.schedule(global_batch, steps_per_epoch=10, epochs=6)
    assert {curve(step) for step in range(21)} == {0.1 * global_batch / 256}
    assert curve(21) < curve(20)


def test_decays_by_hand() -> None:
    def rates(decay: str | StepDecay | PolynomialDecay, steps: list[int]) -> list[float]:
        recipe = LargeBatch(0.1, 100, warmup_epochs=2, decay=decay)
        curve = recipe.schedule(400, steps_per_epoch=10, epochs=12)
        return [curve(step) for step in steps]

    assert rates("constant", [20, 119, 500]) == [0.4, 0.4, 0.4]
    assert rates("cosine", [20, 70, 120, 500]) == pytest.approx([0.4, 0.2, 0.0, 0.0], abs=1e-15)
    assert rates("cosine", [45]) == pytest.approx([0.2 * (1 + math.sqrt(0.5))])
    assert rates("polynomial", [20, 70, 120, 500]) == pytest.approx([0.4, 0.1, 0.0, 0.0])
    assert rates(PolynomialDecay(power=1), [70]) == pytest.approx([0.2])
    step_decay = StepDecay(milestones=(4, 7.5), factor=0.5)
    assert rates(step_decay, [20, 39, 40, 74, 75, 119, 500]) == pytest.approx(
        [0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.1]
    )


def test_step_decay_defaults_are_the_90_epochs_of_the_paper() -> None:
    curve = LargeBatch(0.1, 256, decay="step").schedule(8192, steps_per_epoch=156, epochs=90)
    by_epoch = [curve(epoch * 156) for epoch in (0, 5, 29, 30, 60, 80, 89)]
    assert by_epoch == pytest.approx([0.1, 3.2, 3.2, 0.32, 0.032, 0.0032, 0.0032])


def test_a_decay_name_means_the_decay_with_its_defaults() -> None:
    for name, decay in {
        "constant": ConstantDecay(),
        "cosine": CosineDecay(),
        "polynomial": PolynomialDecay(power=2),
        "step": StepDecay(milestones=(30, 60, 80), factor=0.1),
    }.items():
        by_name = LargeBatch(0.1, 256, decay=name).schedule(1024, 3, 90)
        assert by_name == LargeBatch(0.1, 256, decay=decay).schedule(1024, 3, 90)


def make_problem() -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(7)
    return torch.nn.Linear(4, 3).double(), torch.randn(64, 4, dtype=torch.float64)


def train(
    model: torch.nn.Module,
    data: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    scheduler: RateScheduler,
    steps: range,
) -> list[float]:
    rates = []
    for step in steps:
        optimizer.zero_grad()
        model(data[step : step + 8]).square().mean().backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def test_scheduler_gives_each_optimizer_step_the_rate_of_the_curve() -> None:
    model, data = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=123.0, momentum=0.9)
    recipe = LargeBatch(0.01, 8, warmup_epochs=1)
    scheduler = recipe.apply(optimizer, global_batch=32, steps_per_epoch=4, epochs=5)
    curve = recipe.schedule(32, 4, 5)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert scheduler.get_last_lr() == [0.01]
    assert train(model, data, optimizer, scheduler, range(22)) == [curve(s) for s in range(22)]


@pytest.mark.parametrize("stop", [1, 3, 6, 13])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resuming_gives_the_same_bits_as_never_stopping(stop: int, optimizer_first: bool) -> None:
    recipe = LargeBatch(0.01, 8, warmup_epochs=1.5, decay=StepDecay((2, 3), 0.3))

    def build(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, RateScheduler]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
        return optimizer, recipe.apply(optimizer, global_batch=32, steps_per_epoch=4, epochs=5)

    whole, data = make_problem()
    whole_rates = train(whole, data, *build(whole), range(20))

    stopped, _ = make_problem()
    optimizer, scheduler = build(stopped)
    first_rates = train(stopped, data, optimizer, scheduler, range(stop))
    position = json.loads(json.dumps(scheduler.state_dict()))

    resumed, _ = make_problem()
    resumed.load_state_dict(stopped.state_dict())
    resumed_optimizer, resumed_scheduler = build(resumed)
    if optimizer_first:
        resumed_optimizer.load_state_dict(optimizer.state_dict())
        resumed_scheduler.load_state_dict(position)
    else:
        resumed_scheduler.load_state_dict(position)
        resumed_optimizer.load_state_dict(optimizer.state_dict())
    rest = train(resumed, data, resumed_optimizer, resumed_scheduler, range(stop, 20))

    assert first_rates + rest == whole_rates
    assert torch.equal(resumed.weight, whole.weight)
    assert torch.equal(resumed.bias, whole.bias)


def test_resuming_at_another_batch_continues_at_the_same_epoch() -> None:
    model, data = make_problem()
    recipe = LargeBatch(0.01, 8, warmup_epochs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = recipe.apply(optimizer, global_batch=16, steps_per_epoch=8, epochs=5)
    train(model, data, optimizer, scheduler, range(20))  # 2.5 epochs

    fresh = torch.optim.SGD(model.parameters(), lr=0.01)
    wider = recipe.apply(fresh, global_batch=32, steps_per_epoch=4, epochs=5)
    wider.load_state_dict(scheduler.state_dict())
    assert wider.get_last_lr() == [recipe.schedule(32, 4, 5)(10)]
    assert fresh.param_groups[0]["lr"] == pytest.approx(2 * optimizer.param_groups[0]["lr"])


def test_applying_again_after_loading_the_optimizer_starts_from_the_rates_it_was_built_with() -> (
    None
):
    model, data = make_problem()
    groups = [{"params": [model.weight], "lr": 0.01}, {"params": [model.bias], "lr": 0.002}]
    recipe = LargeBatch(0.01, 8, warmup_epochs=1)
    optimizer = torch.optim.SGD(groups)
    scheduler = recipe.apply(optimizer, global_batch=32, steps_per_epoch=4, epochs=5)
    train(model, data, optimizer, scheduler, range(9))
    again = recipe.apply(optimizer, global_batch=32, steps_per_epoch=4, epochs=5)
    assert again.get_last_lr() == pytest.approx([0.01, 0.002])


def test_parameter_groups_keep_their_ratios() -> None:
    model, data = make_problem()
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.002}, {"params": [model.bias]}], lr=0.01
    )
    recipe = LargeBatch(0.01, 8, warmup_epochs=1)
    curve = recipe.schedule(32, 4, 5)
    scheduler = recipe.apply(optimizer, global_batch=32, steps_per_epoch=4, epochs=5)
    for step in range(20):
        small, full = scheduler.get_last_lr()
        assert full == curve(step)
        assert small == pytest.approx(curve(step) / 5)
        train(model, data, optimizer, scheduler, range(step, step + 1))


def test_a_rate_kept_in_a_tensor_stays_in_that_tensor() -> None:
    model, _ = make_problem()
    rate = torch.tensor(1.0, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    LargeBatch(0.25, 8, warmup_epochs=0).apply(
        optimizer, global_batch=16, steps_per_epoch=4, epochs=5
    )
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_nonsense_in_the_recipe_is_refused() -> None:
    for arguments, message in [
        ({"base_rate": 0.0}, "base_rate=0.0"),
        ({"base_rate": math.nan}, "base_rate=nan"),
        ({"base_batch": 0}, "base_batch=0"),
        ({"base_batch": 2.5}, "base_batch=2.5"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"decay": "cosin"}, "Did you mean 'cosine'?"),
        ({"decay": "zigzag"}, "constant, cosine, polynomial, step"),
        ({"rule": "linaer"}, "Did you mean 'linear'?"),
    ]:
        with pytest.raises(UserError, match=re.escape(message)):
            LargeBatch(**{"base_rate": 0.1, "base_batch": 256, **arguments})


def test_nonsense_in_a_decay_is_refused() -> None:
    for milestones in [(), (60, 30), (30, 30)]:
        with pytest.raises(UserError, match="rising order"):
            StepDecay(milestones=milestones)
    for factor in (0, 1.5):
        with pytest.raises(UserError, match="factor="):
            StepDecay(factor=factor)
    with pytest.raises(UserError, match="power=0"):
        PolynomialDecay(power=0)


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (LargeBatch(0.1, 256), {"global_batch": 0}, "global_batch=0"),
        (LargeBatch(0.1, 256), {"global_batch": 1.5}, "global_batch=1.5"),
        (LargeBatch(0.1, 256), {"steps_per_epoch": 0}, "steps_per_epoch=0"),
        (LargeBatch(0.1, 256), {"epochs": 0}, "epochs=0"),
        (LargeBatch(0.1, 256), {"epochs": 5}, "warmup_epochs=5 leaves nothing"),
        (LargeBatch(0.1, 256, decay="step"), {"epochs": 80}, "before the end"),
        (LargeBatch(0.1, 256, decay=StepDecay((5, 9))), {}, "after the warm-up"),
    ],
)
def test_nonsense_in_the_training_is_refused(
    recipe: LargeBatch, arguments: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        recipe.schedule(**{"global_batch": 512, "steps_per_epoch": 4, "epochs": 90, **arguments})


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(UserError, match="step=-1"):
        LargeBatch(0.1, 256).schedule(512, 4, 90)(-1)


def test_misuse_of_apply_is_refused() -> None:
    model, _ = make_problem()
    recipe = LargeBatch(0.1, 8)
    training = {"global_batch": 32, "steps_per_epoch": 4, "epochs": 9}
    with pytest.raises(UserError, match=r"Linear is not a torch\.optim\.Optimizer"):
        recipe.apply(model, **training)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.05}]
    )
    with pytest.raises(UserError, match=r"rates \[0\.5, 0\.05\].*base_rate=0\.1"):
        recipe.apply(optimizer, **training)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    scheduler = LargeBatch(0.5, 8).apply(optimizer, **training)
    with pytest.raises(UserError, match="steps_per_epoch"):
        scheduler.load_state_dict({"last_epoch": 3})


def test_import_needs_nothing_but_torch() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import farandole.optim; "
        "print({name.split('.')[0] for name in set(sys.modules) - before} "
        "- set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "{'farandole'}", done.stderr


def test_the_example_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "large-batch.md"
    [example] = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    with torch.random.fork_rng():  # it seeds
        exec(example, {})
    [shown] = re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert capsys.readouterr().out == shown

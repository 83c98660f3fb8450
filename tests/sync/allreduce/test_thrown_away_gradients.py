"""What a codec leaves out of gradients that the script throws away is thrown away with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from farandole.sync import Strategy, parse
from farandole.testing import run_world
from farandole.train import Run

CODECS = ["fp16", "bf16", "int8", "topk:ratio=0.05", "randk", "sign", "powersgd:warm_steps=0"]
ROUGH = "topk:ratio=0.05"
STEPS = 6
Weights = torch.Tensor
Kind = Callable[..., torch.optim.Optimizer]


def codec(text: str) -> Strategy:
    return parse(f"allreduce:codec={text.replace(',', '/')}")


def drawn(into: int, out: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(into + out)
    model = nn.Linear(into, out, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
    return model


def batch(run: Run, step: int) -> torch.Tensor:
    return torch.full((2, 40), float(run.rank + step + 1)).double() / 7


def weights_of(*models: nn.Module) -> Weights:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def same_weights(left: list[Weights], right: list[Weights]) -> bool:
    return all(torch.equal(left[0], weights) for weights in (*left, *right))


class Gan:
    """Each model's pass goes through the other and leaves gradients there, unless that is frozen,
    or the script detaches what comes out of it."""

    def __init__(
        self,
        *,
        keeps_apart: bool,
        generator_first: bool = False,
        save_after: int | None = None,
        load: bool = False,
    ) -> None:
        self.keeps_apart, self.generator_first = keeps_apart, generator_first
        self.save_after, self.load = save_after, load

    def __call__(self, run: Run) -> Weights:
        generator, discriminator = drawn(40, 50), drawn(50, 30)
        of_generator = torch.optim.SGD(generator.parameters(), 0.05)
        of_discriminator = torch.optim.SGD(discriminator.parameters(), 0.05)
        run.distribute(generator, of_generator)
        run.distribute(discriminator, of_discriminator)
        if self.load:
            assert run.load() is not None

        def train_discriminator(x: torch.Tensor) -> None:
            fake = generator(x)
            of_discriminator.zero_grad()
            # As PyTorch's example: two passes, which add up.
            discriminator(x.repeat(1, 2)[:, :50]).cos().mean().backward()
            seen = fake.detach() if self.keeps_apart else fake
            discriminator(seen).square().mean().backward()
            of_discriminator.step()

        def train_generator(x: torch.Tensor) -> None:
            of_generator.zero_grad()
            discriminator.requires_grad_(not self.keeps_apart)
            discriminator(generator(x)).sin().mean().backward()
            discriminator.requires_grad_(True)
            of_generator.step()

        phases: list[Callable[[torch.Tensor], None]] = [train_discriminator, train_generator]
        if self.generator_first:
            phases.reverse()
        for _ in run.epochs(STEPS):
            for train in phases:
                train(batch(run, run.epoch))
            if run.epoch + 1 == self.save_after:
                run.save()
                break
        return weights_of(generator, discriminator)


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("generator_first", [False, True])
def test_a_gan_learns_as_if_the_other_model_were_frozen(
    text: str, generator_first: bool, tmp_path: Path
) -> None:
    apart, free = (
        run_world(
            2,
            Gan(keeps_apart=keeps_apart, generator_first=generator_first),
            folder=tmp_path,
            sync=codec(text),
        )
        for keeps_apart in (True, False)
    )
    assert same_weights(apart, free)


@pytest.mark.parametrize("generator_first", [False, True])
def test_one_that_resumes_goes_on_to_the_bit(generator_first: bool, tmp_path: Path) -> None:
    """It is saved while gradients that nobody will use are there."""

    def script(*, save_after: int | None = None, load: bool = False) -> Gan:
        return Gan(
            keeps_apart=False, generator_first=generator_first, save_after=save_after, load=load
        )

    whole = run_world(2, script(), folder=tmp_path / "whole", sync=codec(ROUGH))
    run_world(2, script(save_after=3), folder=tmp_path / "cut", sync=codec(ROUGH))
    after = run_world(2, script(load=True), folder=tmp_path / "cut", sync=codec(ROUGH))
    assert same_weights(whole, after)


def tasks(run: Run, *, given: bool, by_hand: bool = False) -> Weights:
    """PCGrad's way: takes the gradients of two tasks for itself, and gives the optimizers the sum.

    Unless they are given, nobody can say which gradients they use. `by_hand`: they use none."""
    models = trunk, head = drawn(40, 50), drawn(50, 30)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        if given:
            run.distribute(model, optimizer)
        else:
            run.distribute(model)
    both = [*trunk.parameters(), *head.parameters()]
    for number in range(STEPS):
        x = batch(run, number)
        taken = []
        for task in (torch.sin, torch.square):
            trunk.zero_grad()
            head.zero_grad()
            task(head(trunk(x))).mean().backward()
            taken.append([parameter.grad.clone() for parameter in both])
        for parameter, first, second in zip(both, *taken, strict=True):
            parameter.grad = first + second
        for optimizer in optimizers:
            if by_hand:
                step_by_hand(optimizer)
            else:
                optimizer.step()
    return weights_of(*models)


def step_by_hand(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer does not hear of it."""
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.05)


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_that_a_script_takes_for_itself_count(by_hand: bool, tmp_path: Path) -> None:
    given, unknown = (
        run_world(
            2, partial(tasks, given=given, by_hand=by_hand), folder=tmp_path, sync=codec(ROUGH)
        )
        for given in (True, False)
    )
    assert same_weights(given, unknown)


def pair(run: Run, kind: Kind) -> list[tuple[nn.Linear, torch.optim.Optimizer]]:
    """A model whose optimizer is of that kind, and another."""
    made = []
    for its_kind in (kind, torch.optim.SGD):
        model = drawn(40, 50)
        optimizer = its_kind(model.parameters(), lr=0.05)
        run.distribute(model, optimizer)
        made.append((model, optimizer))
    return made


def require_same_without_steps_between(body: Callable[..., Weights], folder: Path) -> None:
    with_steps, without = (
        run_world(2, partial(body, steps_between=between), folder=folder, sync=codec(ROUGH))
        for between in (True, False)
    )
    assert same_weights(with_steps, without)


def test_gradients_that_stay_and_add_up_count(tmp_path: Path) -> None:
    """Although another model's optimizer steps between two passes."""

    def body(run: Run, *, steps_between: bool) -> Weights:
        (model, of_model), (other, of_other) = pair(run, torch.optim.SGD)
        for step in range(4 * STEPS):
            if step % 4 == 0:
                of_model.zero_grad()
            model(batch(run, step)).sin().mean().backward()
            other(batch(run, step)).sin().mean().backward()
            if steps_between:
                of_other.step()
            other.zero_grad()
            if step % 4 == 3:
                of_model.step()
        return weights_of(model)

    require_same_without_steps_between(body, tmp_path)


class Silent(torch.optim.Optimizer):
    """One of the many that step in a way that PyTorch does not count."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "step"), [(Silent, step), (torch.optim.SGD, step_by_hand)], ids=["silent", "by hand"]
)
def test_gradients_that_were_used_count(
    kind: Kind,
    step: Callable[[torch.optim.Optimizer], None],
    tmp_path: Path,
) -> None:
    """However they were used, and although another model's optimizer steps then."""

    def body(run: Run, *, steps_between: bool) -> Weights:
        (model, of_model), (other, of_other) = pair(run, kind)
        for number in range(STEPS):
            model.zero_grad()
            model(batch(run, number)).sin().mean().backward()
            step(of_model)
            other(batch(run, number)).sin().mean().backward()
            if steps_between:
                of_other.step()
            other.zero_grad()
        return weights_of(model)

    require_same_without_steps_between(body, tmp_path)

"""`lagged` where not every backward pass is followed by a step: right, or refused by name."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farandole.errors import UserError
from farandole.sync import parse
from farandole.sync.allreduce.unused_passes import UnusedPasses
from farandole.testing import run_world
from farandole.train import Run

SAID = "lagged needs a step of the optimizer after each backward pass"


def follow(passes: str) -> UnusedPasses:
    """`s`: with a step, `-`: without one."""
    unused = UnusedPasses("lagged")
    for one in passes:
        unused.begin_pass()
        if one == "s":
            unused.step()
    return unused


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2))
def test_a_gradient_scaler_is_left_alone(first: int, between: int, skips: int) -> None:
    """It begins with a scale that is too large, and grows it now and then."""
    passes = "-" * first + "s" * 30 + ("s" * between + "-") * skips + "s" * 30
    assert isinstance(follow(passes), UnusedPasses), "nothing was raised"


@pytest.mark.parametrize("pattern", ["-s", "s-", "--s", "-ss", "sssss-", "---s"])
def test_patterns_of_scripts_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=SAID):
        follow(pattern * 8)


def gan(run: Run, *, freezes: bool, at_once: bool) -> torch.Tensor:
    """As in PyTorch's own example; `at_once`: true and false images in one pass."""
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    with torch.no_grad():
        for place, weight in enumerate([*generator.parameters(), *discriminator.parameters()]):
            weight.fill_(0.1 * (place + 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), 1e-3)
    run.distribute(generator, of_generator)
    run.distribute(discriminator, of_discriminator)
    for _ in range(20):
        discriminator.zero_grad()
        fake = generator(torch.ones(4, 2))
        real_loss = discriminator(torch.ones(4, 3)).mean()
        fake_loss = -discriminator(fake.detach()).mean()
        if at_once:
            (real_loss + fake_loss).backward()
        else:
            real_loss.backward()
            fake_loss.backward()
        of_discriminator.step()
        generator.zero_grad()
        discriminator.requires_grad_(not freezes)
        discriminator(fake).mean().backward()
        discriminator.requires_grad_(True)
        of_generator.step()
    weights = [*generator.parameters(), *discriminator.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize(("freezes", "at_once"), [(False, False), (False, True), (True, False)])
def test_a_gan_is_refused_before_anything_comes_late(
    tmp_path: Path, freezes: bool, at_once: bool
) -> None:
    with pytest.raises(UserError, match=SAID):
        run_world(
            2,
            lambda run: gan(run, freezes=freezes, at_once=at_once),
            folder=tmp_path,
            sync=parse("lagged:steps=20"),
        )


def test_a_gan_that_freezes_its_discriminator_is_right(tmp_path: Path) -> None:
    """As long as nothing is late, to the bit; and then all ranks have the same."""

    def trained(sync: str) -> list[torch.Tensor]:
        return run_world(
            2,
            lambda run: gan(run, freezes=True, at_once=True),
            folder=tmp_path,
            sync=parse(sync),
        )

    synchronous, late = trained("lagged:steps=20"), trained("lagged:steps=5")
    assert torch.equal(synchronous[0], trained("allreduce")[0])
    assert torch.equal(late[0], late[1])
    assert not torch.equal(late[0], synchronous[0])


def accumulated(run: Run, *, says_so: bool) -> list[torch.Tensor]:
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        with run.no_sync(model) if says_so else nullcontext():
            model(torch.ones(2, 3).double()).square().mean().backward()
        model(torch.full((2, 3), 2.0).double()).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_gradients_in_parts_are_refused_without_no_sync(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"with run\.no_sync\(model\)"):
        run_world(
            2, lambda run: accumulated(run, says_so=False), folder=tmp_path, sync=parse("lagged")
        )


def test_gradients_in_parts_with_no_sync(tmp_path: Path) -> None:
    """All samples are alike on both ranks, so a plain loop, one step late, is the oracle."""
    found = run_world(
        2,
        lambda run: accumulated(run, says_so=True),
        folder=tmp_path,
        sync=parse("lagged:steps=0"),
    )
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    late: list[torch.Tensor] | None = None
    for _ in range(20):
        model.zero_grad()
        model(torch.ones(2, 3).double()).square().mean().backward()
        model(torch.full((2, 3), 2.0).double()).square().mean().backward()
        now = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), late or [], strict=bool(late)):
                parameter.sub_(gradient, alpha=0.01)
        late = now
    for rank in found:
        for parameter, expected in zip(rank, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-12, atol=1e-12)

"""What a script does to its parameters besides the optimizer's step: the servers would undo it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import UserError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run

STRATEGIES = [
    "server",
    "server:update=worker",
    "server:staleness=1",
    "server:async,overlap",
    "server:async,update=worker",
    "downpour",
    "downpour:push=2,fetch=3",
]
STEPS = 9


def clips(model: nn.Linear) -> None:
    """As the script of a Wasserstein GAN does it: PyTorch does not count it as a change."""
    model.weight.data.clamp_(-0.01, 0.01)


def loads(model: nn.Linear) -> None:
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def trained(run: Run, touch: Callable[[nn.Linear], None], at: int) -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    source = TensorDataset(torch.ones(2 * run.size * STEPS, 3))
    for number, (x,) in enumerate(run.loader(source, batch_size=2)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if number == at:
            touch(model)
    return model


PUSHES_CHANGES = "server:update=worker"
"""What happens between two steps is a part of what this one pushes, if nothing else comes first."""


@pytest.mark.parametrize(
    ("strategy", "touch", "at"),
    [
        (strategy, touch, at)
        for touch, at in [(clips, 2), (loads, 6), (loads, STEPS - 1)]
        for strategy in STRATEGIES
        if strategy != PUSHES_CHANGES or at == STEPS - 1
    ],
)
def test_it_is_refused(
    tmp_path: Path, strategy: str, touch: Callable[[nn.Linear], None], at: int
) -> None:
    with pytest.raises(
        UserError, match="'weight' has been changed outside of the optimizer's step"
    ):
        run_world(2, lambda run: trained(run, touch, at), folder=tmp_path, sync=parse(strategy))


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("strategy", ["server", PUSHES_CHANGES])
def test_behind_a_step_it_is_found_by_value(tmp_path: Path, strategy: str, saves: bool) -> None:
    """Where a pass ends and where a model is saved, also a change that PyTorch does not count."""

    def body(run: Run) -> None:
        def touch(model: nn.Linear) -> None:
            clips(model)
            if saves:
                run.save()

        trained(run, touch, STEPS - 1 if not saves else STEPS - 2)

    with pytest.raises(UserError, match="'weight' has been changed outside"):
        run_world(2, body, folder=tmp_path, sync=parse(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_before_the_first_step_weights_can_be_loaded(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        run.distribute(model, optimizer)
        with torch.no_grad():
            model.weight.fill_(7.0)
        for (x,) in run.loader(TensorDataset(torch.zeros(8, 3)), batch_size=2):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return model.weight[0, 0].item()

    assert run_world(2, body, folder=tmp_path, sync=parse(strategy)) == [7.0, 7.0]


def perturbed_and_put_back(run: Run, *, takes_away: bool) -> nn.Linear:
    """Sharpness-aware minimization: the gradient is that of a place near by."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.distribute(model, optimizer)
    for (x,) in run.loader(TensorDataset(torch.ones(40 * run.size, 3)), batch_size=2):
        model(x).square().mean().backward()
        before = [parameter.data.clone() for parameter in model.parameters()]
        with torch.no_grad():
            moves = [0.1 * p.grad / p.grad.norm() for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            pairs = zip(model.parameters(), before, moves, strict=True)
            for parameter, value, move in pairs:
                if takes_away:
                    parameter.sub_(move)
                else:
                    parameter.data = value
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("takes_away", [False, True])
@pytest.mark.parametrize("strategy", ["server", "server:update=worker"])
def test_what_is_put_back_before_the_step_harms_nothing(
    tmp_path: Path, strategy: str, takes_away: bool
) -> None:
    """All samples are alike, so that any number of workers takes the same steps."""

    def body(run: Run) -> nn.Linear:
        return perturbed_and_put_back(run, takes_away=takes_away)

    (alone,) = run_world(1, body, folder=tmp_path / "alone")
    assert not torch.equal(alone.weight, torch.full((1, 3), 0.5))
    for model in run_world(2, body, folder=tmp_path, sync=parse(strategy)):
        torch.testing.assert_close(model.weight, alone.weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaged_weights_for_an_evaluation(tmp_path: Path, strategy: str) -> None:
    """Behind a pass nothing is on its way from the servers."""

    def body(run: Run) -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run.distribute(model, optimizer)
        source = TensorDataset(torch.ones(2 * run.size * STEPS, 3))
        for _ in run.epochs(3):
            for (x,) in run.loader(source, batch_size=2):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            own = copy.deepcopy(model.state_dict())
            loads(model)
            evaluated = float(model(torch.ones(1, 3)).detach())
            model.load_state_dict(own)
        return evaluated

    assert run_world(2, body, folder=tmp_path, sync=parse(strategy)) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_optimizer_is_refused(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        first = torch.optim.SGD(model[0].parameters(), 0.01)
        second = torch.optim.SGD(model[1].parameters(), 0.01)
        run.distribute(model, first)
        for (x,) in run.loader(TensorDataset(torch.ones(24, 3)), batch_size=2):
            model(x).mean().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad(set_to_none=False)

    said = r"'1\.weight' is trained by SGD, which run\.distribute was not given"
    with pytest.raises(UserError, match=said):
        run_world(2, body, folder=tmp_path, sync=parse(strategy))


@pytest.mark.parametrize("touch", [clips, loads])
def test_changes_that_are_pushed_are_right(
    tmp_path: Path, touch: Callable[[nn.Linear], None]
) -> None:
    found, expected = (
        run_world(
            2,
            lambda run: trained(run, touch, 5).weight.detach(),
            folder=tmp_path / sync.partition(":")[0],
            sync=parse(sync),
        )
        for sync in (PUSHES_CHANGES, "allreduce")
    )
    for weight in found:
        torch.testing.assert_close(weight, expected[0])


def limited(run: Run, *, saves: bool = False) -> torch.Tensor:
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Linear(3, 1)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.distribute(model, optimizer)
    for _ in run.epochs(2):
        for (x,) in run.loader(TensorDataset(torch.arange(48) % 4), batch_size=4, shuffle=False):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.arange(4))
        if saves:
            run.save()
    return model[0].weight.detach()


def test_embeddings_that_limit_their_weights(tmp_path: Path) -> None:
    """They do so in the forward pass, of the rows that they are asked for: here of all."""
    found, expected = (
        run_world(2, limited, folder=tmp_path / sync.partition(":")[0], sync=parse(sync))
        for sync in (PUSHES_CHANGES, "allreduce")
    )
    torch.testing.assert_close(found[0], expected[0])
    run_world(2, lambda run: limited(run, saves=True), folder=tmp_path, sync=parse(PUSHES_CHANGES))
    for strategy in ("server", "downpour"):
        with pytest.raises(UserError, match=r"'0\.weight' belongs to an embedding with a max_norm"):
            run_world(2, limited, folder=tmp_path, sync=parse(strategy))


@pytest.mark.parametrize("strategy", ["server", "server:staleness=1", "downpour"])
def test_a_checkpoint_is_loaded_in_the_middle_of_training(tmp_path: Path, strategy: str) -> None:
    def body(run: Run) -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run.distribute(model, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            if step == 1:
                run.save()
            if step == 3:
                run.load()
        return model.weight.sum().item()

    first, second = run_world(2, body, folder=tmp_path, sync=parse(strategy))
    assert abs(first - second) < 0.2  # in step up to a few steps of 0.03


def test_parts_that_the_optimizer_does_not_train(tmp_path: Path) -> None:
    """They have gradients, and are swapped and put back, or held by another table."""

    def body(run: Run) -> list[torch.Tensor]:
        shared, actor, critic = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        first = nn.Sequential(shared, actor)
        second = nn.Sequential(shared, critic)
        of_all = torch.optim.SGD(first.parameters(), 0.01)
        of_critic = torch.optim.SGD(critic.parameters(), 0.01)
        run.distribute(first, of_all)
        run.distribute(second, of_critic)
        for _ in run.epochs(2):
            for (x,) in run.loader(TensorDataset(torch.ones(12, 3)), batch_size=2):
                of_all.zero_grad()
                of_critic.zero_grad()
                (first(x) + second(x)).mean().backward()
                of_all.step()
                of_critic.step()
            own = copy.deepcopy(second.state_dict())
            second.load_state_dict({name: value * 0 for name, value in own.items()})
            second.load_state_dict(own)
        return [layer.bias.detach() for layer in (shared, actor, critic)]

    first, second = run_world(2, body, folder=tmp_path, sync=parse("server"))
    assert all(map(torch.equal, first, second))


def test_one_worker_may_have_two_optimizers(tmp_path: Path) -> None:
    """With nobody to be apart from, what the servers do not hold is trained all the same."""

    def body(run: Run) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        before = model[1].bias.detach().clone()
        first = torch.optim.SGD(model[0].parameters(), 0.01)
        second = torch.optim.SGD(model[1].parameters(), 0.01)
        run.distribute(model, first)
        for (x,) in run.loader(TensorDataset(torch.ones(12, 3)), batch_size=2):
            first.zero_grad()
            second.zero_grad()
            model(x).mean().backward()
            first.step()
            second.step()
        return before - model[1].bias.detach()

    (moved,) = run_world(1, body, folder=tmp_path, sync=parse("server"))
    torch.testing.assert_close(moved, torch.tensor([0.06]))

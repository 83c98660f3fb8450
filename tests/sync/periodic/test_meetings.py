"""Ranks that average their models meet, whatever became of the steps between, and stop together.

A gradient scaler skips a step where a gradient is not finite, on one rank and not on another. No
rank may wait for one that does not come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import DivergedError, UserError
from farandole.sync import AdaComm, DiLoCo, Federated, Local, PostLocal, Strategy
from farandole.sync.periodic.losses import Losses
from farandole.sync.periodic.meeting import RankStatus, loss_of
from farandole.testing import run_world
from farandole.train import Run

STEPS = 4  # in an epoch
SOON = timedelta(seconds=20)  # a rank that has not come by then never will


def data(count: int = 6 * STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


# Skipped steps


@dataclasses.dataclass(frozen=True)
class Outcome:
    in_step: list[bool]
    model: dict[str, torch.Tensor]


class Skipping:
    """Trains; takes only the steps that `steps[rank]` lists, and may save and stop."""

    def __init__(
        self, steps: list[set[int]], *, epochs: int = 2, save_after: int = 0, load: bool = False
    ) -> None:
        self.steps, self.epochs, self.save_after, self.load = steps, epochs, save_after, load

    def __call__(self, run: Run) -> Outcome:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        wrapped, _ = run.distribute(model, optimizer)
        if self.load:
            assert run.load() is not None
        source, in_step = data(), []
        for _ in run.epochs(self.epochs):
            for x, y in run.loader(source, global_batch_size=6):
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                loss.backward()
                run.observe_loss(loss)
                if run.steps - 1 in self.steps[run.rank]:
                    optimizer.step()
                if run.steps == self.save_after:
                    run.save()
                    return Outcome([], {})
            in_step.append(bool(run.check_in_step(wrapped)))
        return Outcome(in_step, {k: v.clone() for k, v in model.state_dict().items()})


STRATEGIES = [
    Local(every=1),
    Local(every=2),
    Local(every=3, momentum=0.5),
    Local(every=2, moments="average"),
    Local(every=5, codec="int8"),
    DiLoCo(every=3),
    DiLoCo(every=6, moments="reset"),
    Federated(every=2),
    AdaComm(start=3, steps=2),
    AdaComm(start=3, steps=2, momentum=0.5),
    PostLocal(every=2, at=0.0),
]


@settings(max_examples=25)
@given(
    sync=st.sampled_from(STRATEGIES),
    steps=st.lists(st.sets(st.integers(0, 2 * STEPS - 1)), min_size=2, max_size=3),
)
def test_whatever_steps_are_skipped_nobody_waits_in_vain(
    tmp_path_factory: pytest.TempPathFactory, sync: Strategy, steps: list[set[int]]
) -> None:
    folder = tmp_path_factory.mktemp("skipping")
    ends = run_world(len(steps), Skipping(steps), folder=folder, sync=sync, timeout=SOON)
    for end in ends:
        assert end.in_step == [True, True]
        assert all(torch.equal(value, ends[0].model[k]) for k, value in end.model.items())
    moved = not torch.equal(ends[0].model["0.weight"], net()[0].weight)
    assert moved == any(steps) or isinstance(sync, Federated)  # where idle ranks may be drawn


def test_a_rank_that_skipped_its_steps_counts_as_much(tmp_path: Path) -> None:
    """The average of a model that moved, and of one that did not."""
    script = Skipping([set(range(STEPS)), set()], epochs=1)
    alone = run_world(2, script, folder=tmp_path, sync=Local(meet_epochs=False))[0].model
    found = run_world(2, script, folder=tmp_path, sync=Local())
    for name, start in net().named_parameters():
        torch.testing.assert_close(found[0].model[name], (start.detach() + alone[name]) / 2)
        assert torch.equal(found[1].model[name], found[0].model[name])


@pytest.mark.parametrize("save_after", [3, 5, 6])
@pytest.mark.parametrize("sync", [Local(every=4), DiLoCo(every=9), Local(every=4, codec="topk")])
def test_a_rank_that_skipped_resumes_where_it_was(
    sync: Strategy, save_after: int, tmp_path: Path
) -> None:
    """Rank 1 has not moved since the ranks were in step; the others have."""
    steps = [set(range(8)), {0, 6, 7}, set(range(8))]
    whole = run_world(3, Skipping(steps), folder=tmp_path / "whole", sync=sync, timeout=SOON)
    stop = Skipping(steps, save_after=save_after)
    run_world(3, stop, folder=tmp_path / "cut", sync=sync, timeout=SOON)
    go_on = Skipping(steps, load=True)
    after = run_world(3, go_on, folder=tmp_path / "cut", sync=sync, timeout=SOON)
    for rank in range(3):
        for name, value in whole[rank].model.items():
            assert torch.equal(after[rank].model[name], value), f"{name} on rank {rank}"


def test_a_real_gradient_scaler(tmp_path: Path) -> None:
    """An infinity on rank 1 only: its scaler skips that step, and halves its scale."""

    def body(run: Run) -> tuple[list[bool], float, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped, _ = run.distribute(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        taken = 0

        def count(*_: Any) -> None:
            nonlocal taken
            taken += 1

        optimizer.register_step_post_hook(count)
        source, in_step = data(), []
        for _ in range(3):
            for x, y in run.loader(source, global_batch_size=6):
                loss = F.cross_entropy(wrapped(x), y)
                if run.rank == 1 and run.steps == 3:
                    loss = loss * 1e308
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            in_step.append(bool(run.check_in_step(wrapped)))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        return in_step, scaler.get_scale(), taken

    for sync in (Local(every=2), DiLoCo(every=5)):
        calm, struck = run_world(2, body, folder=tmp_path, sync=sync, timeout=SOON)
        assert calm == ([True] * 3, 1024.0, 3 * STEPS)
        assert struck == ([True] * 3, 512.0, 3 * STEPS - 1)


# What is not finite


class Diverging:
    """Spoils something before the fourth step, with which the second period ends."""

    def __init__(self, spoil: Callable[[Run, nn.Module], float]) -> None:
        self.spoil = spoil

    def __call__(self, run: Run) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
        """The message, and the parameters before the meeting and after."""
        model, expected = net(), list[torch.Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped, _ = run.distribute(model, optimizer)
        x, y = (tensor[run.rank :: 2] for tensor in data().tensors)

        def train() -> None:
            for step in range(9):
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                run.observe_loss(self.spoil(run, model) if step == 3 else 1.0)
                parameters = list(model.parameters())
                expected[:] = [torch.add(p, p.grad, alpha=-0.1).detach() for p in parameters]
                optimizer.step()

        with pytest.raises(DivergedError) as caught:
            train()
        return str(caught.value), expected, list(model.parameters())


def spoil_parameter(run: Run, model: nn.Module) -> float:
    if run.rank == 1:
        with torch.no_grad():
            model[2].bias[0] = torch.nan
    return 1.0


def spoil_gradient(run: Run, model: nn.Module) -> float:
    if run.rank == 1:
        model[2].bias.grad[0] = -torch.inf
    return 1.0


def spoil_loss(run: Run, model: nn.Module) -> float:
    return math.nan if run.rank == 1 else 1.0


@pytest.mark.filterwarnings("ignore:rank 1, step 4")
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (spoil_parameter, "its parameter '2.bias'"),
        (spoil_gradient, "its gradient of '2.bias'"),
        (spoil_loss, "its loss"),
    ],
)
@pytest.mark.parametrize(
    "sync",
    [
        Local(every=2),
        Local(every=2, codec="int8"),
        DiLoCo(every=2),
        Federated(every=2, fraction=0.01),
        AdaComm(start=2),
    ],
    ids=str,
)
def test_what_is_not_finite_stops_all_and_reaches_none(
    sync: Strategy, spoil: Callable[[Run, nn.Module], float], what: str, tmp_path: Path
) -> None:
    ends = run_world(2, Diverging(spoil), folder=tmp_path, sync=sync, timeout=SOON)
    for message, _, _ in ends:
        assert message.startswith(f"rank 1, step 4: {what} is not finite. No")
    _, expected, found = ends[0]
    assert all(torch.equal(own, left) for own, left in zip(expected, found, strict=True))


# What ranks tell each other


def status(**values: float) -> RankStatus:
    return RankStatus(**{**dict.fromkeys(RankStatus._fields, 0.0), "logged": math.nan, **values})


def test_the_loss_is_the_mean_of_all_batches() -> None:
    assert loss_of([status(loss_sum=6, loss_count=3), status(loss_sum=2, loss_count=1)]) == 2
    assert loss_of([status(loss_sum=6, loss_count=3), status(logged=9)]) == 2


def test_else_it_is_what_rank_0_logged() -> None:
    assert loss_of([status(logged=3), status(logged=5)]) == 3
    assert loss_of([status(), status(logged=5)]) is None


def test_losses_are_told_once() -> None:
    losses = Losses()
    losses.observe_loss(torch.tensor(1.5, requires_grad=True))
    losses.observe_loss(2)
    losses.hear(7.0)
    other = Losses()
    other.load_state_dict(losses.state_dict())
    for each in (losses, other):
        assert each.take() == (3.5, 2)
        assert each.take() == (0.0, 0)
        assert (each.logged, each.logs) == (7.0, 1)


def test_a_loss_is_one_number(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = net()
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(UserError, match=r"run\.observe_loss.*one number.*\(6,\)"):
            run.observe_loss(torch.zeros(6))
        run.observe_loss(torch.zeros(1, 1))

    run_world(2, body, folder=tmp_path, sync=Local())

"""A gradient that is not finite in one stage of one replica stops all ranks, before any update."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farandole.errors import DivergedError, FarandoleError, StageError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run

SOON = timedelta(seconds=20)
ILL_STEP = 3


class End(NamedTuple):
    error: Exception | None
    updates: int  # steps that changed this rank's parameters
    is_finite: bool


class Invalidated(torch.autograd.Function):
    """Passes on what it is given; gradients become NaN on their way to the layers before."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, invalidate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(invalidate)  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (invalidate,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.where(invalidate > 0, torch.nan, gradients[0]), None


class Early(nn.Module):
    """Its gradients are spoiled where the last column of its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ill = (x[:, -1:] > 100).float()
        return Invalidated.apply(self.inner(x.clamp(max=1.0)), ill)  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    layers = nn.Sequential(Early(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layers


def train(run: Run, layout: str, sync: str, pipe: int) -> End:
    """The first layer's gradient is NaN in the third step, in the second replica if there is one;
    those of the later layers, which have their gradients before, are finite."""
    own = model()
    trainer = run.trainer(
        own, F.cross_entropy, lambda ps: torch.optim.SGD(ps, 0.1), layout=layout, sync=parse(sync)
    )
    generator = torch.Generator().manual_seed(3)
    is_ill_here = run.rank // pipe == (run.size // pipe) - 1
    error: Exception | None = None
    updates = 0
    for step in range(1, 7):
        x = torch.randn(8, 4, generator=generator).clamp(-1, 1)
        y = torch.randint(3, (8,), generator=generator)
        if step == ILL_STEP and is_ill_here:
            x[:, -1] = 1000.0
        before = [p.detach().clone() for p in trainer.model.parameters()]
        try:
            trainer.step(x, y)
        except FarandoleError as raised:
            error = raised
        now = list(trainer.model.parameters())
        updates += any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        if error is not None:
            break
    fine = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    return End(error, updates, fine)


def world(size: int, layout: str, sync: str, folder: Path, pipe: int, **more: bool) -> list[End]:
    return run_world(
        size, lambda run: train(run, layout, sync, pipe), folder=folder, timeout=SOON, **more
    )


@pytest.mark.parametrize(
    ("size", "layout", "sync", "culprit"),
    [
        (2, "stages=2,microbatches=2,schedule=gpipe", "allreduce", 0),
        (2, "stages=2,microbatches=2,schedule=1f1b", "allreduce", 0),
        (2, "stages=2,microbatches=2,schedule=zero-bubble", "allreduce", 0),
        (2, "stages=2,microbatches=2,schedule=gems", "allreduce", None),
        (4, "stages=2,microbatches=2", "allreduce", 2),
        (4, "stages=2,microbatches=2", "allreduce:codec=int8", 2),
        (4, "stages=2,microbatches=2", "lagged:steps=9", 2),
        (2, "stages=1,microbatches=2", "allreduce", 1),
    ],
)
def test_no_stage_is_updated(
    size: int, layout: str, sync: str, culprit: int | None, tmp_path: Path
) -> None:
    pipe = 1 if "stages=1" in layout else 2
    for end in world(size, layout, sync, tmp_path, pipe):
        assert isinstance(end.error, DivergedError), end.error
        said = "rank " if culprit is None else f"rank {culprit}, step {ILL_STEP}: its gradient of "
        assert str(end.error).startswith(said)
        assert "'0.inner." in str(end.error)
        assert end.updates == ILL_STEP - 1
        assert end.is_finite


def test_under_local_steps_all_replicas_stop_at_the_next_meeting(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 2, step 3: its gradient of"):
        ends = world(4, "stages=2,microbatches=2", "local:every=5", tmp_path, 2)
    for end in ends:
        assert isinstance(end.error, DivergedError), end.error
        assert str(end.error).startswith("rank 2, step 3: its gradient of '0.inner.")
        assert end.is_finite


@pytest.mark.parametrize(
    "layout", ["stages=2,schedule=pipedream", "stages=2,microbatches=2,schedule=2bw"]
)
def test_in_a_stream_the_stage_that_finds_it_stops_the_others(layout: str, tmp_path: Path) -> None:
    first, last = world(2, layout, "allreduce", tmp_path, 2)
    assert isinstance(first.error, DivergedError), first.error
    assert isinstance(last.error, StageError), last.error
    assert "rank 0, step " in str(first.error)
    assert "'0.inner." in str(last.error)
    assert first.is_finite
    assert last.is_finite


@pytest.mark.parametrize("layout", ["stages=2,microbatches=2", "stages=2,schedule=pipedream"])
def test_without_the_check_it_goes_on(layout: str, tmp_path: Path) -> None:
    first, last = world(2, layout, "allreduce", tmp_path, 2, check_finite=False)
    assert first.error is None
    assert last.error is None
    assert not first.is_finite


def test_tiles(tmp_path: Path) -> None:
    def body(run: Run) -> End:
        own = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))
        trainer = run.trainer(
            own, F.mse_loss, lambda ps: torch.optim.SGD(ps, 0.1), layout="tiles=2x1"
        )
        x, y = torch.ones(2, 1, 8, 8), torch.zeros(2, 1, 8, 8)
        trainer.step(x, y)
        error: Exception | None = None
        try:
            trainer.step(x * math.nan, y)
        except FarandoleError as raised:
            error = raised
        return End(error, 1, all(bool(torch.isfinite(p).all()) for p in own.parameters()))

    for end in run_world(2, body, folder=tmp_path, timeout=SOON):
        assert isinstance(end.error, DivergedError), end.error
        assert end.is_finite

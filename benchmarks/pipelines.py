"""What benchmarks of pipelines share: runs side by side, and stages that sleep.

Stages sleep instead of computing, so that a schedule shows and not the machine. A block sleeps in
its forward and in its backward, and a ledger notes how long, and how many graphs are alive. What a
rank was not asleep for it waited, whatever its cores were doing.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS
from torch import Tensor, nn

import farandole as fd
from farandole.train.settings import Settings
from farandole.train.trainer import Trainer

_WIDTH = 8


def new_run(world: fd.Run, seed: int = 0) -> fd.Run:
    """For one side of a comparison: a run has room for one model that is cut."""
    settings = Settings(name=f"side-{seed}", folder=world.folder, script="benchmark")
    return fd.Run(world.group, world.topology, world.device, settings=settings, seed=seed)


class Ledger:
    """What the blocks of this rank did."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.held = 0  # graphs of a stage and a micro-batch that are alive
        self.peak = 0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.busy_seconds += time.perf_counter() - begin

    def restart(self) -> None:
        self.busy_seconds, self.peak = 0.0, self.held


class _Held:
    """Lives as long as the graph that it hangs on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.held += 1
        ledger.peak = max(ledger.peak, ledger.held)

    def __del__(self) -> None:
        self._ledger.held -= 1


class _Asleep(torch.autograd.Function):
    """The same values; the backward sleeps."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, ledger: Ledger, seconds: float, held: _Held | None
    ) -> Tensor:
        ctx.ledger, ctx.seconds, ctx.held = ledger, seconds, held
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ledger.sleep(ctx.seconds)
        return gradients[0], None, None, None


class Sleeper(nn.Module):
    """Adds a weight. Half of its backward is the input's, so that it can be split in two; where
    nobody asks for the gradient of the input, all of it is the weight's."""

    def __init__(self, ledger: Ledger, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_WIDTH))
        self._ledger = ledger
        self._forward_seconds = forward_seconds
        self._backward_seconds = backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        self._ledger.sleep(self._forward_seconds)
        share = 0.5 if x.requires_grad else 0.0
        weight = _Asleep.apply(
            self.weight,
            self._ledger,
            (1 - share) * self._backward_seconds,
            _Held(self._ledger),
        )
        return _Asleep.apply(x, self._ledger, share * self._backward_seconds, None) + weight


class Sleepers:
    """A model of sleeping blocks under one layout, a block for each stage.

    `forward_seconds` and `backward_seconds` are those of a rank: stages that share one share them.
    """

    def __init__(
        self, world: fd.Run, layout: fd.Layout, forward_seconds: float, backward_seconds: float
    ) -> None:
        assert layout.stages != "auto"
        shared = layout.stages // layout.ranks
        self.ledger = Ledger()
        # A cut by hand: nothing is left to be measured.
        self.layout = dataclasses.replace(layout, balance=(1,) * layout.stages)
        self.run = new_run(world)
        blocks = [
            Sleeper(self.ledger, forward_seconds / shared, backward_seconds / shared)
            for _ in range(layout.stages)
        ]
        self.trainer: Trainer = self.run.trainer(
            blocks,
            _loss,
            lambda weights: torch.optim.SGD(weights, 0.01),
            layout=self.layout,
            check=False,  # what is measured is training
        )

    def step(self, samples: int) -> None:
        self.trainer.step(torch.zeros(samples, _WIDTH), torch.zeros(samples, _WIDTH))

    def busy_seconds(self) -> float:
        """*Together.* Of all ranks, since the ledger was restarted."""
        return self.run.sum(self.ledger.busy_seconds)

    def peaks(self) -> list[int]:
        """*Together.* By rank: the most graphs that were alive at once."""
        own = torch.zeros(self.run.size, dtype=torch.int64)
        own[self.run.rank] = self.ledger.peak
        return self.run.sum(own).tolist()

    def close(self) -> None:
        self.run.close()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def add_options(
    parser: argparse.ArgumentParser, *, forward_ms: float, repeats: int, save_as: str
) -> None:
    parser.add_argument("--forward-ms", type=float, default=forward_ms, help="of each rank")
    parser.add_argument("--backward-ms", type=float, help="twice a forward, unless given")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--save", default=save_as, metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")


def seconds_of(args: argparse.Namespace) -> tuple[float, float]:
    """Of a forward and of a backward."""
    backward_ms = 2 * args.forward_ms if args.backward_ms is None else args.backward_ms
    return args.forward_ms / 1000, backward_ms / 1000

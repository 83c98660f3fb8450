"""The sides of a comparison of strategies: each trains a model of its own, and is timed alike.

A side is a strategy by its text form, such as `local:every=4`, or `ddp`: PyTorch's own
DistributedDataParallel on gloo, which knows nothing of Farandole. All sides of a script run in the
same processes, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from common import spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.comm import Group
from farandole.data import Loader, LoaderOptions
from farandole.sync import parse
from farandole.train.settings import Settings

ALLREDUCE, DDP = "allreduce", "ddp"

T = TypeVar("T")


class Side:
    """A model under one strategy, with a `Run` of its own: epochs, loaders and counters."""

    def __init__(
        self, world: fd.Run, name: str, model: nn.Module, opt: Optimizer, seed: int = 0
    ) -> None:
        self.name = name
        settings = Settings(name=f"side-{seed}", folder=world.folder, script="benchmark")
        self.run = fd.Run(world.group, world.topology, world.device, settings=settings, seed=seed)
        self.model: nn.Module
        if name == DDP:
            self.model, self.opt, self.plain = DistributedDataParallel(model), opt, model
        else:
            self.model, self.opt = self.run.distribute(model, opt, sync=parse(name))
            self.plain = self.run.unwrap(self.model)

    def loader(self, dataset: TensorDataset, batch: int) -> Loader:
        """For DDP one that its run does not know, which would ask where the model is."""
        if self.name != DDP:
            return self.run.loader(dataset, batch_size=batch)
        options = LoaderOptions(batch_size=batch, seed=self.run.seed)
        return Loader(dataset, options, group=self.run.group, device=self.run.device)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.run.observe_loss(loss)  # before the step, which may end in a meeting about it
        self.opt.step()

    def decisions(self) -> list[dict[str, float | str]]:
        """What the strategy has chosen by itself so far, such as a new period. On rank 0."""
        return [{"steps": counters["steps"], **note} for counters, note in self.run._metrics.notes]

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return self.run.no_sync(self.model)

    def meet(self) -> None:
        """Makes the replicas one, where the strategy lets them differ."""
        if self.name == DDP:
            return
        meet = getattr(self.run._session.models.synchronizer_of(self.model), "meet", None)
        if meet is not None:
            meet()


class Clock:
    """Counts while a side trains: seconds, the bytes that this host sent over its link, and those
    that Farandole counted on this rank.

    It stops when the slowest rank has arrived, and goes on when all are back. What it has counted
    can be read in a pause and after it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.seconds = 0.0
        self.link_bytes = self.bytes_sent = 0
        self._go_on()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._group.barrier()
        self.seconds += time.perf_counter() - self._began
        self.link_bytes += _link_bytes() - self._link_bytes_before
        self.bytes_sent += self._group.meter.bytes_sent - self._bytes_sent_before
        yield
        self._go_on()

    def _go_on(self) -> None:
        self._group.barrier()
        self._link_bytes_before = _link_bytes()
        self._bytes_sent_before = self._group.meter.bytes_sent
        self._began = time.perf_counter()


def _link_bytes() -> int:
    """What this host has sent so far, headers included."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def rotated(sides: list[T], turn: int) -> list[T]:
    """In another order in every turn: whoever comes first or last has no lasting advantage."""
    first = turn % len(sides)
    return sides[first:] + sides[:first]


def timed(group: Group, work: Callable[[], None]) -> float:
    """Seconds that the slowest rank took, when all began together."""
    group.barrier()
    begin = time.perf_counter()
    work()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    return float(group.all_reduce(taken, "max"))


def communication(side: Side, x: Tensor, y: Tensor, steps: int, blocks: int) -> dict[str, float]:
    """What a step of a synchronous side takes, with its communication and without.

    Without, the replicas drift apart: the side is of no use afterwards.
    """

    def block() -> None:
        for _ in range(steps):
            side.step(x, y)

    def alone() -> None:
        with side.no_sync():
            block()

    block()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(blocks):
        seconds["with"].append(timed(side.run.group, block) / steps)
        seconds["without"].append(timed(side.run.group, alone) / steps)
    step, compute = (spread(values)["median"] for values in seconds.values())
    return {
        "step_ms": 1000 * step,
        "compute_ms": 1000 * compute,
        "share": 1 - compute / step,
        "communication_over_compute": step / compute - 1,
    }

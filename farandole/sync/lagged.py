"""Lagged all-reduce: each step applies the average of the step before, while its own travels.

    step        t−1          t            t+1
    compute     ▇▇▇▇▇▇▇▇▇▇▇ ▇▇▇▇▇▇▇▇▇▇▇ ▇▇▇▇▇▇▇▇▇▇▇
    travels                 g(t−1) ───▶  g(t) ─────▶
    applied     g(t−2)      g(t−1)       g(t)

Communication has a whole step to hide behind. All ranks apply the same gradients, so they are in
step at all times; every gradient is applied once: the first lagged step applies nothing, and the
first synchronous one after it two. The run is synchronous in its first and last share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.sync.alignment import check_same_model, spread_from_first
from farandole.sync.gradients import Guarded, averaging, is_trained, names_by_parameter, settled
from farandole.sync.guard import GradientGuard
from farandole.sync.strategy import (
    Strategy,
    Synchronizer,
    require_at_least,
    require_optimizer,
    require_share,
)
from farandole.sync.weighing import Weighing


@dataclasses.dataclass(frozen=True)
class Lagged(Strategy):
    """All-reduce, one step late: the pipelined mode of Cray's plugin."""

    name: ClassVar[str] = "lagged"

    first: float = 0.1  # this share of the run is synchronous, at its beginning
    last: float = 0.1  # and this one at its end; both need run.epochs, which knows the end
    steps: int = 10  # at least so many steps are synchronous at the beginning
    unused: bool = False

    def __post_init__(self) -> None:
        require_share(self, "first")
        require_share(self, "last")
        require_at_least(self, "steps", 0)

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        given = require_optimizer(self, optimizer)
        check_same_model(model, group)
        spread_from_first(model, given, group)
        if group.size == 1 or not is_trained(model):
            return Synchronizer(model, model)
        return _LaggedAtWork(self, model, given, group)


class _LaggedAtWork(Synchronizer):
    def __init__(
        self, config: Lagged, model: nn.Module, optimizer: Optimizer, group: Group
    ) -> None:
        self._config = config
        self._progress: float | None = None
        guard = GradientGuard(optimizer, group, range(group.size))
        self._late = _Late(group, guard, names_by_parameter(model), self._is_lagged)
        ddp = averaging(model, group, self._late, unused=config.unused)
        self._weighing = Weighing()
        self._weighing.follow(ddp)
        super().__init__(ddp, model)
        self.notes.append({"phase": "synchronous"})
        self._was_lagged = False
        optimizer.register_step_pre_hook(self._before_step)

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        self._weighing.weight = weight
        self._progress = progress
        if self._was_lagged != self._is_lagged():
            self._was_lagged = not self._was_lagged
            self.notes.append({"phase": "lagged" if self._was_lagged else "synchronous"})

    def end_pass(self) -> None:
        self._weighing.weight = 1.0

    def no_sync(self) -> AbstractContextManager[None]:
        ddp = self.model
        return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else nullcontext()

    def _is_lagged(self) -> bool:
        if self._late.passes < self._config.steps:
            return False
        if self._progress is None:
            return True
        return self._config.first <= self._progress < 1 - self._config.last

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Where nothing has arrived yet, nothing is applied: not even momentum moves on."""
        for parameter in self._late.empty:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._late.passes, "late": self._late.arrived()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._late.passes = state["passes"]
        self._late.restore(state["late"])


class _Late(Guarded):
    """Gives each bucket the average of the step before, by the names of its gradients."""

    def __init__(
        self,
        group: Group,
        guard: GradientGuard,
        names: Mapping[torch.Tensor, str],
        is_lagged: Callable[[], bool],
    ) -> None:
        super().__init__(group, guard, names)
        self._is_lagged = is_lagged
        self._lagged = False
        self._travelling: dict[str, tuple[Future[torch.Tensor], torch.Tensor]] = {}
        self.passes = 0  # backward passes that were averaged
        self.empty: set[torch.Tensor] = set()
        """Parameters that have no gradient in this step, because the first is still on its way."""

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            self._lagged = self._is_lagged()
            self.empty.clear()
        if bucket.is_last():
            self.passes += 1
        if self._lagged:
            return self._reduce_late(bucket)
        late = {name: self._arrived(name) for name in self._names_in(bucket)}
        future = super().reduce(bucket)
        if all(average is None for average in late.values()):
            return future
        gradients = bucket.gradients()

        def add_late(done: Future[torch.Tensor]) -> torch.Tensor:
            for gradient, average in zip(gradients, late.values(), strict=True):
                if average is not None:
                    gradient.add_(average)
            return done.value()

        return future.then(add_late)

    def _reduce_late(self, bucket: GradBucket) -> Future[torch.Tensor]:
        names, buffer = self._names_in(bucket), bucket.buffer()
        self._guard.note(names, buffer, last=bucket.is_last())
        mine = buffer.clone()
        future = self._group.average_future(mine)
        for name, parameter, gradient in zip(
            names, bucket.parameters(), bucket.gradients(), strict=True
        ):
            late = self._arrived(name)
            if late is None:
                gradient.zero_()
                self.empty.add(parameter)
            else:
                gradient.copy_(late)
            offset = gradient.storage_offset() - buffer.storage_offset()
            place = mine.as_strided(gradient.size(), gradient.stride(), offset)
            self._travelling[name] = (future, place)
        return settled(buffer)

    def _arrived(self, name: str) -> torch.Tensor | None:
        """The average that was sent in the step before; it is here once only."""
        if name not in self._travelling:
            return None
        future, average = self._travelling.pop(name)
        if not future.done():
            with self._group.meter.waiting():
                future.wait()
        else:
            future.wait()
        return average

    def arrived(self) -> dict[str, torch.Tensor]:
        """Everything that was sent and not applied yet; it stays so."""
        for future, _ in self._travelling.values():
            future.wait()
        return {name: average for name, (_, average) in self._travelling.items()}

    def restore(self, late: Mapping[str, torch.Tensor]) -> None:
        self._travelling = {
            name: (settled(average), average.clone()) for name, average in late.items()
        }

    def _names_in(self, bucket: GradBucket) -> list[str]:
        return [self._names[parameter] for parameter in bucket.parameters()]

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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.futures import Future
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.gpu.device_average import DeviceAverage
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.allreduce.reductions import Average, Pending, Then, may_be_trained, settled
from farandole.sync.allreduce.unused_passes import UnusedPasses
from farandole.sync.base import (
    Strategy,
    Synchronizer,
    require_at_least,
    require_optimizer,
    require_share,
)
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.sync.common.closures import with_gradients
from farandole.sync.common.guard import GradientGuard
from farandole.sync.common.weighing import Weighing


@dataclasses.dataclass(frozen=True)
class Lagged(Strategy):
    """All-reduce, one step late: the pipelined mode of Cray's plugin."""

    name: ClassVar[str] = "lagged"

    first: float = 0.1  # this share of the run is synchronous, at its beginning
    last: float = 0.1  # and this one at its end; both need run.epochs, which knows the end
    steps: int = 10  # at least so many steps are synchronous at the beginning

    def __post_init__(self) -> None:
        require_share(self, "first")
        require_share(self, "last")
        require_at_least(self, "steps", 0)

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        given = require_optimizer(self, optimizer)
        check_same_model(model, group)
        spread_from_first(model, given, group)
        if group.size == 1 or not may_be_trained(model):
            return Synchronizer(model, guard=GradientGuard(model, given, group))
        return _LaggedAtWork(self, model, given, group)


class _LaggedAtWork(Synchronizer):
    def __init__(
        self, config: Lagged, model: nn.Module, optimizer: Optimizer, group: Group
    ) -> None:
        self._config = config
        self._progress: float | None = None
        self._late = _Late(group, self._is_lagged)
        reducer = GradientReducer(model, group, self._late, optimizer=optimizer)
        guard = GradientGuard(model, optimizer, group, reducer)
        super().__init__(model, Weighing(model), reducer, guard)
        self.notes.append({"phase": "synchronous"})
        self._was_lagged = False
        optimizer.register_step_pre_hook(self._before_step)

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        super().begin_step(weight, progress, samples)
        self._progress = progress
        if self._was_lagged != self._is_lagged():
            self._was_lagged = not self._was_lagged
            self.notes.append({"phase": "lagged" if self._was_lagged else "synchronous"})

    def _is_lagged(self) -> bool:
        if self._late.passes < self._config.steps:
            return False
        if self._progress is None:
            return True
        return self._config.first <= self._progress < 1 - self._config.last

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return with_gradients(args, kwargs, self._withhold)

    def _withhold(self) -> None:
        """Leaves out parameters whose first average has not arrived: their momentum stays too."""
        # Not earlier, in the reduction: a gradient scaler looks at gradients before the step, and
        # raises where it finds none. Zeros stand in until now.
        self._late.unused.step()
        for parameter in self._late.empty:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._late.passes, "late": self._late.arrived()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._late.passes = state["passes"]
        self._late.restore(state["late"])


class _Late(Average):
    """Gives each bucket the average of the step before, by the names of its gradients.

    Invariant: an average is in `_travelling` from when it is sent until it is applied, and
    `_arrived` removes it there. So every gradient is applied exactly once, also where the phase
    changes, a parameter gets no gradient for a while, or the buckets are packed anew.
    """

    def __init__(self, group: Group, is_lagged: Callable[[], bool]) -> None:
        super().__init__(group)
        self._is_lagged = is_lagged
        self._lagged = False
        self._travelling: dict[str, _Travelling] = {}
        self.passes = 0  # backward passes that were averaged
        self.unused = UnusedPasses("lagged")
        self.empty: set[torch.Tensor] = set()
        """Parameters that have no gradient in this step, because the first is still on its way."""

    def reduce(self, bucket: Bucket) -> Pending:
        # Decided once for a pass: all its buckets are late or none is. Buckets come in the order of
        # their index, the same on all ranks, so all of them decide with the same counts.
        if bucket.index == 0:
            self.unused.begin_pass()
            self._lagged = self._is_lagged()
            self.empty.clear()
        if bucket.is_last:
            self.passes += 1
        if self._lagged:
            return self._reduce_late(bucket)
        # The first synchronous step after late ones: the last late average is still due, and is
        # added to this step's, after this step's has been averaged. It is an average already.
        late = [self._arrived(name) for name in bucket.names]
        synchronous = super().reduce(bucket)
        if all(average is None for average in late):
            return synchronous

        def add_late() -> None:
            for place, average in enumerate(late):
                if average is not None:
                    gradient = bucket.gradients[place]
                    # From a checkpoint it is on the CPU.
                    gradient.add_(average.gradient.to(gradient.device))
                    bucket.has_gradient[place] = 1.0
                    bucket.notes.add_(average.notes)

        return Then(synchronous, add_late)

    def _reduce_late(self, bucket: Bucket) -> Pending:
        # What travels is a copy: the bucket's own buffer is about to hold the older average, which
        # the step applies while the copy is on its way.
        mine = bucket.buffer.clone()
        future = self._group.average_future(mine)
        flags, notes = _same_place(bucket.has_gradient, mine), _same_place(bucket.notes, mine)
        bucket.notes.zero_()
        # By name and not by bucket: what was sent in the first pass comes back after the buckets
        # have been packed anew.
        for place, (name, parameter, gradient) in enumerate(
            zip(bucket.names, bucket.parameters, bucket.gradients, strict=True)
        ):
            late = self._arrived(name)
            bucket.has_gradient[place] = 0.0 if late is None else 1.0
            if late is None:
                gradient.zero_()
                self.empty.add(parameter)
            else:
                gradient.copy_(late.gradient)
                bucket.notes.add_(late.notes)
            self._travelling[name] = _Travelling(
                future, _same_place(gradient, mine), flags[place], notes
            )
        return settled(bucket.buffer)

    def _arrived(self, name: str) -> _Travelling | None:
        """Takes out the average that was sent in the step before; waits for it.

        None where nothing was sent, or no rank had a gradient.
        """
        if name not in self._travelling:
            return None
        sent = self._travelling.pop(name)
        if not sent.future.done():
            with self._group.meter.waiting():
                sent.future.wait()
        else:
            sent.future.wait()
        return sent if sent.flag > 0 else None

    def arrived(self) -> dict[str, torch.Tensor]:
        """Everything that was sent and not applied yet; it stays to be applied."""
        for sent in self._travelling.values():
            sent.future.wait()
        return {name: sent.gradient for name, sent in self._travelling.items() if sent.flag > 0}

    def restore(self, late: Mapping[str, torch.Tensor]) -> None:
        self._travelling = {
            name: _Travelling(settled(average), average.clone(), torch.ones(()), torch.zeros(()))
            for name, average in late.items()
        }


class _Travelling(NamedTuple):
    """A gradient that is being averaged. The flag is above 0 if any rank had one; the notes are
    those of its bucket."""

    future: Future[torch.Tensor] | DeviceAverage
    gradient: torch.Tensor
    flag: torch.Tensor
    notes: torch.Tensor


def _same_place(gradient: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Where a gradient of a bucket is in a copy of the bucket's buffer."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    place = copy.as_strided(real.size(), real.stride(), real.storage_offset())
    return torch.view_as_complex(place) if gradient.is_complex() else place

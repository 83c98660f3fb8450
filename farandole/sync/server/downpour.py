"""Downpour SGD, as DistBelief has it: replicas that run on their own, and servers that add up.

    worker    step step step step step step …      each applies its own gradient at once
                   │push│    │push│                what was accrued, every `push` steps
                   ▼    ▲fetch    ▲                the servers' parameters, every `fetch` steps
    servers   Adagrad   ·         ·                or the script's own optimizer: `downpour_rule`

Adagrad is what makes it robust: where many replicas push, the rate of a parameter falls by itself.
A warm start lets rank 0 train alone first, until the model is past its wildest moves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.errors import CommError
from farandole.sync.server.base import ServerSynchronizer
from farandole.sync.server.downpour_rule import server_step
from farandole.sync.server.table import ParameterTable

_POLL_SECONDS = 0.02


class DownpourOptions(Protocol):
    """The options that `downpour` is built with. See strategies.py for what each means."""

    @property
    def push(self) -> int: ...
    @property
    def fetch(self) -> int: ...
    @property
    def warmstart(self) -> int: ...
    @property
    def gain(self) -> float | None: ...


class DownpourSynchronizer(ServerSynchronizer):
    """`downpour` at work on one model."""

    def __init__(
        self, config: DownpourOptions, model: nn.Module, optimizer: Optimizer, group: Group
    ) -> None:
        self._config = config
        self._accrued: dict[str, torch.Tensor] = {}
        self._gains: dict[str, float] = {}
        late = group.transport.joined_late
        self._waits_for_first = config.warmstart > 0 and group.rank > 0 and not late
        super().__init__(model, optimizer, group)
        self._warm = self._store.own_name("warm start")
        self._store.create(self._warm, 1, dtype="int64")

    def _create(self, part: ParameterTable) -> None:
        step = server_step(
            part.settings,
            self._optimizer,
            push=self._config.push,
            workers=self._group.size,
            gain=self._config.gain,
        )
        self._gains[part.name] = step.gain
        self._store.create(part.name, part.count, dtype=part.dtype_name, rule=step.rule)
        self._accrued[part.name] = torch.zeros(part.count, dtype=part.dtype)

    def _begin(self) -> None:
        super()._begin()
        if self._waits_for_first:
            self._waits_for_first = False
            self._await_first()
            self._read_all()

    def _await_first(self) -> None:
        """Waits until rank 0 has taken the steps that it takes alone."""
        # By a counter on the servers, not by a barrier: rank 0 is in the middle of its pass then,
        # and takes no part in collectives. The limit is on the time without progress.
        patience = self._group.timeout.total_seconds()
        done, changed = -1, time.monotonic()
        while done < self._config.warmstart:
            now = int(self._store.get(self._warm))
            if now != done:
                done, changed = now, time.monotonic()
            elif time.monotonic() - changed > patience:
                raise CommError(
                    f"rank {self._group.rank} waits for the end of rank 0's warm start, and that "
                    f"has stood at step {done} of {self._config.warmstart} for {patience:g} s."
                )
            else:
                time.sleep(_POLL_SECONDS)

    def _about_to_step(self) -> None:
        self._steps += 1
        self._finish_pushes()  # `outgoing` is about to be written again
        self._begin()
        for part in self._parts if not self._scaler_skips() else ():
            # Every step is accrued, also between pushes. What a push sends is a sum, never a mean:
            # the servers apply the rate to it once.
            part.gather_gradients(self._scale())
            self._require_finite(part, "its gradient of")
            self._accrued[part.name] += part.outgoing

    def _stepped(self) -> None:
        if self._steps % self._config.push == 0:
            self._push()
        if self._steps % self._config.fetch == 0:
            self._finish_reads()  # one that has not arrived for `fetch` steps is waited for
            self._reads = [(part, part.start_read()) for part in self._parts]
        if self._group.rank == 0 and self._steps <= self._config.warmstart:
            self._store.push(self._warm, torch.ones(1, dtype=torch.int64))

    def _push(self) -> None:
        for part in self._parts:
            accrued = self._accrued[part.name]
            part.outgoing.copy_(accrued)
            accrued.zero_()
            rate = float(part.settings["lr"]) * self._gains[part.name]
            self._pushes.append(self._store.start_push(part.name, part.outgoing, rate=rate))

    def _arrive(self) -> None:
        """Replaces the parameters by what was read, as soon as it is there. Does not wait."""
        # Local steps since the read began are overwritten. They are not lost: their gradients are
        # accrued, and reach the servers with the next push.
        if self._reads and self._have_arrived():
            self._finish_reads()

    def end_pass(self) -> None:
        """Pushes the rest; then all ranks read the same parameters."""
        super().end_pass()
        # First barrier: all pushes are applied. Second: all have read, before anybody pushes again.
        self._pause()
        if self._steps % self._config.push:
            self._push()
            self._settle()
        self._group.barrier()
        self._read_all()
        self._average_statistics()
        self._group.barrier()
        self._count()

    def _pause(self) -> None:
        if self._group.rank == 0 and self._steps < self._config.warmstart:
            short = self._config.warmstart - self._steps
            # The pass ends within the warm start, and the next barrier needs all ranks: the warm
            # start is over, and the counter says so.
            self._store.push(self._warm, torch.tensor([short]))
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "accrued": self._accrued}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, accrued in state["accrued"].items():
            self._accrued[name].copy_(accrued)
        self._waits_for_first = False

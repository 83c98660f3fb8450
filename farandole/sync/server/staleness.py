"""Training through parameter servers: synchronous, boundedly stale, or asynchronous.

    worker    ─forward─backward─┐ push g, end clock c   ┌─ wait? ─forward─…
    servers   ──────────────────┴─ apply g ──── read ───┘

`bsp`: the servers gather all workers' gradients of a clock and apply their mean: the same updates
as all-reduce makes. A staleness of s: each gradient is applied when it arrives, and a worker at
clock c goes on when everyone has ended clock c − s − 1; what it reads holds all updates up to
there, all of its own, and perhaps newer ones. `async`: nobody waits for anybody.

Under all-reduce N gradients make one step; applied one by one they make N. So that a learning rate
means the same under every strategy, each of them is applied at its share, η/N.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.server.rules import rule_of
from farandole.sync.server.base import ServerSynchronizer
from farandole.sync.server.table import ParameterTable


class StalenessOptions(Protocol):
    """The options that `server` is built with. See strategies.py for what each means."""

    @property
    def staleness(self) -> int | str: ...
    @property
    def backups(self) -> int: ...
    @property
    def update(self) -> str: ...
    @property
    def overlap(self) -> bool: ...
    @property
    def is_synchronous(self) -> bool: ...


class StalenessSynchronizer(ServerSynchronizer):
    """`server` at work on one model."""

    def __init__(
        self, config: StalenessOptions, model: nn.Module, optimizer: Optimizer, group: Group
    ) -> None:
        self._config = config
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}  # while a step is taken
        self._is_skipped = False
        super().__init__(model, optimizer, group)

    def _create(self, part: ParameterTable) -> None:
        on_server = self._config.update == "server"
        self._store.create(
            part.name,
            part.count,
            dtype=part.dtype_name,
            rule=rule_of(part.settings, self._optimizer) if on_server else "add",
            rounds=self._config.is_synchronous,
            backups=self._config.backups,
        )

    def _catch_up(self) -> None:
        self._store.catch_up()

    # A step

    @property
    def _pushes_changes(self) -> bool:
        return self._config.update == "worker"

    def _about_to_step(self) -> None:
        self._steps += 1
        self._settle()  # `outgoing` is about to be written, and `incoming` read into, again
        self._begin()
        self._is_skipped = self._scaler_skips()
        if self._config.update == "worker" or self._is_skipped:
            return
        for part in self._parts:
            part.gather_gradients(self._scale())
            self._require_finite(part, "its gradient of")
        # Without gradients the optimizer leaves the parameters alone: the servers move them. The
        # step is still taken, so that schedulers and the script's own hooks see one.
        for settings in self._optimizer.param_groups:
            for parameter in settings["params"]:
                if parameter.grad is not None:
                    self._gradients[parameter] = parameter.grad
                    parameter.grad = None

    def _stepped(self) -> None:
        # Scripts look at gradients after the step, and accumulate where they do not zero them.
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients.clear()
        if self._is_skipped:
            return
        # Synchronous servers apply the mean of N gradients once, others apply N gradients one by
        # one. The share makes both move as far.
        share = 1.0 if self._config.is_synchronous else 1 / self._group.size
        by_worker = self._config.update == "worker"
        for part in self._parts if by_worker else ():
            part.gather_change(share)
            self._require_finite(part, "the change of")
        for part in self._parts:
            rate = 1.0 if by_worker else float(part.settings["lr"]) * share
            push, read = self._store.start_exchange(
                part.name,
                part.outgoing,
                out=part.incoming,
                rate=rate,
                # The worker's clock moves on with the last table's push. With an earlier one others
                # could read that this clock has ended while its later tables are on their way.
                ticks=part is self._parts[-1],
                needs=self._needs(),
                rounds=self._config.is_synchronous,
            )
            self._pushes.append(push)
            self._reads.append((part, read))
        self._store.tick()
        if self._config.is_synchronous:
            self._finish_reads()
            if self._config.backups:
                # A clock may have ended without this worker: it goes on with the newest.
                self._store.clock = max([self._store.clock, *self._finish_pushes()])

    def _needs(self) -> int:
        """The clock that all must have reached before what is read at the next one is good.

        Invariant of a staleness s: parameters used at clock c hold every worker's updates of all
        clocks below c − s. What is read now is used one clock later, with overlap two. So the read
        itself must wait for the bound of the later clock: when it is used, nobody checks again.
        """
        if self._config.staleness == "async":
            return -1
        bound = 0 if self._config.is_synchronous else int(self._config.staleness)
        used_at = self._store.clock + 1 + self._config.overlap
        return max(0, used_at - bound)

    def _arrive(self) -> None:
        """Makes what was read after the last step the parameters.

        Waits for it, except with overlap: then a read that is still on its way is used one step
        later.
        """
        if not self._config.overlap or self._have_arrived():
            self._finish_reads()

    # Passes

    def end_pass(self) -> None:
        """Waits for all pushes, lets all ranks read the same, and sets all clocks alike."""
        super().end_pass()
        # A rank that rests counts as infinitely far ahead, so those behind can end their pass. The
        # first barrier follows the last push, the second the last read: all read the same model.
        self._pause()
        self._group.barrier()
        self._read_all()
        self._average_statistics()
        self._go_on()
        self._group.barrier()
        self._count()

    def _pause(self) -> None:
        # Before `_settle`: a read of this rank may wait for clocks of others, and theirs for this
        # rank's. Once this rank rests, theirs are answered.
        self._store.rest()
        self._settle()

    def _go_on(self) -> None:
        # Ranks with fewer steps in the pass, or that were skipped as backups, have older clocks. At
        # different clocks they would wait for each other in the next pass for no reason, or not
        # wait where they must.
        clock = self._store.clock
        if self._config.is_synchronous:
            clock = max(self._store.rounds(part.name) for part in self._parts)
        self._store.wake(max(self._group.gather_json(clock)))

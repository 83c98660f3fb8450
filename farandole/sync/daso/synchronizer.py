"""DASO at work: hosts train apart, and exchange their models without waiting for each other.

At the end of each pass over the data all ranks are brought in step, with their statistics and the
optimizer's moments, so that what is evaluated and saved is one model.

Steps are counted by backward passes: a gradient scaler may skip a step on one host only, and all
hosts must start and merge an exchange at the same count. That is the invariant here: whatever a
host skips, the n-th exchange begins and ends after the same number of backward passes everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.base import Synchronizer
from farandole.sync.common.flat import load_buffers
from farandole.sync.common.guard import Culprit, GradientGuard, diverged, stop
from farandole.sync.common.hooks import ForwardHook
from farandole.sync.common.weighing import Weighing
from farandole.sync.daso.cycle import Cycle, CycleRule, Phase
from farandole.sync.daso.host_exchange import HostExchange
from farandole.sync.daso.reduction import PhaseReduction
from farandole.sync.periodic.average import ModelAverage
from farandole.sync.periodic.base import loss_is_missing
from farandole.sync.periodic.losses import Losses
from farandole.sync.periodic.meeting import (
    RankStatus,
    ask_everyone,
    bad_parameter,
    loss_of,
    raise_together,
    require_sound,
    status_of,
)


class DasoSynchronizer(Synchronizer):
    """`daso` at work on one model. `codec`: of what travels between hosts."""

    def __init__(
        self,
        rule: CycleRule,
        codec: Codec | None,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
    ) -> None:
        self._group = group
        self._optimizer = optimizer
        self._cycle = Cycle(rule)
        self._phase: Phase = "warm-up"
        self._exchange = HostExchange(model, group, codec)
        self._average = ModelAverage(model, optimizer, group)
        self._gradients = PhaseReduction(group, self._exchange.local)
        reducer = GradientReducer(
            model, group, self._gradients, optimizer=optimizer, spread_buffers=False
        )
        self._guard = GradientGuard(model, optimizer, group, reducer, self._on_culprit)
        self._steps = 0
        self._guard.count = lambda: self._steps + 1
        self._culprit: Culprit | None = None  # on this host; raised on all at the next exchange
        super().__init__(model, Weighing(model), reducer, self._guard)
        model.register_forward_pre_hook(ForwardHook(self._count))
        optimizer.register_step_post_hook(lambda *_: self._count())
        self._losses = Losses()
        self._epoch_loss: float | None = None
        self._since = 0  # steps since the last exchange began
        self._apart = False  # hosts may hold different models
        self._passes = 0
        self._steps_before_pass = 0
        self._note()

    def begin_pass(self) -> None:
        super().begin_pass()
        if self._passes and self._steps == self._steps_before_pass:
            return  # the last pass only looked at the data: it was no epoch
        self._passes += 1
        self._steps_before_pass = self._steps
        if self._passes < 2:
            return
        loss = self._epoch_loss
        # The script may log the epoch's loss after the pass, and so after the last question. All
        # ranks lack it or none does: it came from what all of them gathered.
        if loss is None:
            loss = loss_of(ask_everyone(self._group, self._status()))
        if loss is None:
            raise loss_is_missing()
        self._epoch_loss = None
        if self._phase == "cycling":
            why = self._cycle.epoch(loss)
            self._note(loss=loss, **({"why": why} if why else {}))

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        self._count()
        super().begin_step(weight, progress, samples)
        self._losses.weight = weight
        # A run that goes on in the middle of an epoch, on other workers, has not seen it begin.
        self._passes = max(self._passes, 1)
        phase = self._cycle.phase(progress, self._passes)
        if phase != self._phase:
            self._enter(phase)

    def end_pass(self) -> None:
        self._count()
        super().end_pass()
        self._losses.weight = 1.0
        self._bring_in_step()

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        self._losses.observe_loss(loss)

    def hear(self, loss: float) -> None:
        self._losses.hear(loss)

    def _enter(self, phase: Phase) -> None:
        # Leaving the cycling phase: the synchronous phases average gradients only, which keeps
        # replicas alike that are alike already and never brings them together.
        if self._phase == "cycling":
            self._bring_in_step()
        self._phase = phase
        self._set_gradients()
        if phase == "cycling":
            self._since = 0
            self._exchange.begin()
        self._note()

    def _set_gradients(self) -> None:
        if self._phase == "cycling":
            self._gradients.average_in_host()
        else:
            self._gradients.average_everywhere()

    def _count(self) -> None:
        """Counts the backward pass that has ended, if there is one.

        Called after a step, and before whatever follows a step that was skipped.
        """
        # Called from several places for one pass; the flag makes the first of them count. The end
        # of the backward pass itself is too early, since the step has not been taken.
        if not self._gradients.done:
            return
        self._gradients.done = False
        self._steps += 1
        if self._passes == 0:
            raise UserError(
                "daso follows the epochs, and no batch came from run.loader. Read the data with "
                "`for x, y in run.loader(dataset, batch_size=…)`."
            )
        if self._phase != "cycling":
            return
        self._apart = True
        self._since += 1
        self._exchange.step()
        # Merging comes first: the next exchange uses the same buffers, so at most one is under way.
        # Both conditions depend on counts only, never on whether the average has arrived, because
        # arrival differs between hosts and `arrive` is a collective of each.
        if self._exchange.under_way and self._exchange.age >= self._cycle.wait:
            self._merge()
        if not self._exchange.under_way and self._since >= self._cycle.period:
            self._note_parameter(self._exchange.culprit())
            self._exchange.start(spoiled=self._guard.is_on and self._culprit is not None)
            self._since = 0

    def _on_culprit(self, found: Culprit) -> None:
        """In an average over all ranks, all have found it. In one over a host, its ranks go on
        without it until the next exchange tells the others, and all stop there."""
        if self._phase != "cycling":
            stop(found)
        self._guard.withhold()
        if self._culprit is None:
            self._culprit = found
            if self._guard.rank == found.rank:
                said = f"{found.error} All ranks stop at the next exchange between hosts."
                warnings.warn(said, stacklevel=2)

    def _note_parameter(self, name: str | None) -> None:
        self._culprit = self._culprit or bad_parameter(self._guard, self._steps, name)

    def _merge(self) -> None:
        """All ranks merge the same average, so all see whether it is finite.

        The average is `wait` steps old by now. It is merged, not copied over the model: the steps
        that this host has taken meanwhile would be lost. See `HostExchange.merge` for the weights.
        """
        is_finite = self._exchange.arrive()
        if self._guard.is_on and not is_finite:
            raise_together(self._group, self._culprit)
            raise diverged(self._guard.rank, self._steps, "the average of the hosts' models")
        self._exchange.merge()

    def _bring_in_step(self) -> None:
        self._guard.settle()
        # An exchange that is not old enough is merged too: what it averaged is older than the
        # models that are averaged next, and must not be merged into them afterwards.
        if self._exchange.under_way:
            self._merge()
        self._note_parameter(self._average.gather())
        said = ask_everyone(self._group, self._status(sound=self._culprit is None))
        require_sound(self._group, self._guard, said, self._culprit)
        self._epoch_loss = loss_of(said) if any(status.loss_count for status in said) else None
        if self._apart:
            self._average.average()
            # Averaging moments is a collective over what the optimizer remembers. A rank whose
            # scaler has skipped every step remembers nothing yet, and then nobody averages.
            if said[0].moments and len({status.moments for status in said}) == 1:
                self._average.average_moments()
        else:
            self._average.average_statistics()
        self._average.scatter()
        self._apart = False
        self._since = 0
        if self._phase == "cycling":
            self._exchange.begin()  # with a codec: distances count from the common model again

    def _status(self, *, sound: bool = True) -> RankStatus:
        return status_of(
            self._losses, self._optimizer, pending=self._apart, steps=self._steps, sound=sound
        )

    def _note(self, **more: float | str) -> None:
        note: dict[str, float | str] = {"phase": self._phase}
        if self._phase == "cycling":
            note |= {"period": self._cycle.period, "wait": self._cycle.wait}
        else:
            note |= {"period": 1, "wait": 0}
        self.notes.append({**note, **more})

    def whole_model(self) -> dict[str, Any]:
        self._count()
        return self._average.whole_model() if self._apart else super().whole_model()

    def state_dict(self) -> dict[str, Any]:
        self._count()
        state: dict[str, Any] = {
            "cycle": self._cycle.state_dict(),
            "phase": self._phase,
            "steps": self._steps,
            "since": self._since,
            "apart": self._apart,
            "passes": self._passes,
            "steps_before_pass": self._steps_before_pass,
            "losses": self._losses.state_dict(),
            "epoch_loss": self._epoch_loss,
            "exchange": self._exchange.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # not all of them are averaged
        }
        if self._apart:
            state["model"] = self.model.state_dict()
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["apart"]:
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        load_buffers(self.model, state["buffers"])
        self._cycle.load_state_dict(state["cycle"])
        self._phase = state["phase"]
        self._set_gradients()
        self._steps, self._since = state["steps"], state["since"]
        self._apart, self._passes = state["apart"], state["passes"]
        self._steps_before_pass = state["steps_before_pass"]
        self._losses.load_state_dict(state["losses"])
        self._epoch_loss = state["epoch_loss"]
        self._exchange.load_state_dict(state["exchange"])
        self._note()

"""Local steps, and now and then an average of the models: what local SGD and its kin share.

    rank 0   ─step─step─step─step─┐          ┌─step─step─step─step─┐
    rank 1   ─step─step─step─step─┼─ meet ───┼─step─step─step─step─┼─ meet ─
    rank 2   ─step─step─step─step─┘  average └─step─step─step─step─┘

A meeting has three parts. All ranks exchange their status (`meeting`), the models are averaged
(`average`), and the next period is decided (`period`). There is a meeting at the end of each pass
over the data too, so that what is evaluated and saved is one model. Such a meeting ends a round of
an outer optimizer only if the round's steps are done.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.base import Synchronizer
from farandole.sync.common.flat import load_buffers
from farandole.sync.common.guard import Culprit, GradientGuard, stop
from farandole.sync.common.weighing import Weighing
from farandole.sync.periodic.average import ModelAverage
from farandole.sync.periodic.losses import Losses
from farandole.sync.periodic.meeting import (
    RankStatus,
    ask_everyone,
    bad_parameter,
    raise_together,
    require_sound,
    status_of,
)
from farandole.sync.periodic.outer import Outer, OuterRule
from farandole.sync.periodic.period import Period

Moments = Literal["keep", "average", "reset"]


@dataclass(frozen=True)
class Rule:
    """How models are averaged."""

    moments: Moments = "keep"  # what becomes of the optimizer's own state when ranks meet
    codec: Codec | None = None
    outer: OuterRule | None = None
    fraction: float | None = None  # of the ranks whose work counts, drawn anew for each round
    seed: int = 0
    meet_epochs: bool = True


class Periodic(Synchronizer):
    """Trains alone for a period, then averages, and so on."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, group: Group, period: Period, rule: Rule
    ) -> None:
        # With a `fraction`, samples are weighed when models are averaged, by those ranks that count
        # in the round. Weighing gradients too would count them twice.
        guard = GradientGuard(model, optimizer, group, act=self._on_culprit)
        super().__init__(model, Weighing(model) if rule.fraction is None else None, guard=guard)
        self._guard = guard
        self._steps = 0  # since the run began
        guard.count = lambda: self._steps + 1
        self._culprit: Culprit | None = None  # raised on all ranks at the next meeting
        self.in_step_after_pass = rule.meet_epochs
        self._group = group
        self._optimizer = optimizer
        self._period = period
        self._rule = rule
        self._average = ModelAverage(model, optimizer, group, rule.codec)
        self._outer = Outer(rule.outer) if rule.outer else None
        if self._outer is not None:
            self._average.remember()
        self._losses = Losses()
        self._weight = 0.0
        self._begun = False
        self._knows_passes = False  # the script reads its data through run.loader
        self._pending = 0  # since all ranks were in step
        self._in_round = 0  # since the last full period ended
        self._rounds = 0
        self._began = time.monotonic()
        self.notes.append({"period": period.steps})
        beside = torch.compiler.disable  # a compiled step
        optimizer.register_step_pre_hook(beside(lambda *_: self._about_to_step()))
        optimizer.register_step_post_hook(beside(lambda *_: self._stepped()))

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        super().begin_step(weight, progress, samples)
        self._losses.weight = weight
        self._weight += samples
        self._knows_passes = True

    def observe_loss(self, loss: torch.Tensor | float) -> None:
        self._losses.observe_loss(loss)

    def hear(self, loss: float) -> None:
        self._losses.hear(loss)

    def begin_pass(self) -> None:
        super().begin_pass()
        if not self._period.lacks_loss:
            return
        said = ask_everyone(self._group, self._status(ending=False, sound=True))
        self._decide_period(said)
        # Before the first step somebody may only have had a look at the data.
        if self._period.lacks_loss and any(status.steps for status in said):
            raise loss_is_missing()

    def end_pass(self) -> None:
        super().end_pass()
        self._losses.weight = 1.0
        if self._rule.meet_epochs:
            self.meet(ending=True)

    def _about_to_step(self) -> None:
        self._begin()
        self._average.before_step()

    def _on_culprit(self, found: Culprit) -> None:
        """A gradient of this rank is not finite: skips the step, and stops at the next meeting."""
        if self._group.size == 1:
            stop(found)
        # Raising here would leave the other ranks waiting at the meeting. So this rank keeps taking
        # steps, which change nothing, until it can tell the others there.
        self._guard.withhold()
        if self._culprit is None:
            self._culprit = found
            warnings.warn(f"{found.error} All ranks stop when they meet.", stacklevel=2)

    def _begin(self) -> None:
        """Starts the first round from the model as it is: it may have been loaded meanwhile."""
        if not self._begun:
            self._begun = True
            self._average.start_here()

    def _stepped(self) -> None:
        self._steps += 1
        self._pending += 1
        self._in_round += 1
        if self._in_round >= self._period.steps:
            self.meet()

    def meet(self, *, ending: bool = False) -> None:
        """All ranks average their models now. `ending` ranks go on meeting until all are ending."""
        # Ranks may come with different numbers of steps (see `meeting`). One that has ended its
        # pass early would otherwise be missing at a meeting that another rank's period demands.
        # The loop ends on all ranks at the same meeting, because all have heard the same.
        self._begin()
        while True:
            culprit = self._find_culprit()
            said = ask_everyone(self._group, self._status(ending=ending, sound=culprit is None))
            require_sound(self._group, self._guard, said, culprit)
            if any(status.pending for status in said):
                self._bring_in_step(said)
            else:  # the parameters are alike; statistics change with every forward pass
                self._average.average_statistics()
                self._average.scatter()
            self._decide_period(said)
            if not ending or all(status.ending for status in said):
                return

    def _find_culprit(self) -> Culprit | None:
        """Copies this rank's model to be averaged, and returns what is not finite on this rank."""
        self._guard.settle()
        name = self._average.gather()
        return self._culprit or bad_parameter(self._guard, self._steps, name)

    def _decide_period(self, said: list[RankStatus]) -> None:
        note = self._period.after(said)
        if note is not None:
            self.notes.append(note)
        if self._period.is_overdue and not self._knows_passes:
            raise loss_is_missing()  # with known passes it may be logged at the end of the epoch

    def _status(self, *, ending: bool, sound: bool) -> RankStatus:
        weight, self._weight = self._weight, 0.0
        return status_of(
            self._losses,
            self._optimizer,
            pending=self._pending,
            steps=self._steps,
            sound=sound,
            ending=ending,
            due=self._in_round >= self._period.steps,
            weight=weight,
            seconds=time.monotonic() - self._began,
        )

    def _bring_in_step(self, said: list[RankStatus]) -> None:
        # From what all have said, and not from this rank's own count: all must agree on it.
        round_is_over = self._outer is None or any(status.due for status in said)
        average = self._average
        average.average(self._share(said))
        if self._outer is not None and average.base is not None:
            # At the end of a pass within a round the models become the plain average, and the base
            # stays: the outer step, when it comes, measures the whole round.
            if round_is_over:
                self._outer.step(average.base, average.weights.buffers)
                for buffer, where in zip(average.weights.buffers, average.base, strict=True):
                    buffer.copy_(where)
        elif self._rule.codec is not None:
            average.remember()  # the average is the same bits on all ranks: distances start here
        average.scatter()
        self._settle_moments(said, round_is_over)
        self._pending = 0
        if round_is_over:
            self._in_round = 0
            self._rounds += 1

    def _share(self, said: list[RankStatus]) -> float | None:
        """Of this rank in the average; None if all count the same."""
        if self._rule.fraction is None:
            return None
        count = max(1, round(self._rule.fraction * self._group.size))
        # Every rank draws for itself and gets the same, by the number of the round. A generator
        # that lived on would have to be saved, and would differ on a rank that joins late.
        draw = random.Random(f"{self._rule.seed}/{self._rounds}")
        chosen = draw.sample(range(self._group.size), count)
        if self._group.rank not in chosen:
            return 0.0
        total = sum(said[rank].weight for rank in chosen)
        return said[self._group.rank].weight / total if total else 1 / count

    def _settle_moments(self, said: list[RankStatus], round_is_over: bool) -> None:
        # Averaging moments is a collective: all ranks must remember the same things. A rank whose
        # gradient scaler has skipped every step remembers nothing yet.
        alike = len({status.moments for status in said}) == 1
        if self._rule.moments == "average" and alike and said[0].moments:
            self._average.average_moments()
        elif self._rule.moments == "reset" and round_is_over:
            self._average.forget_moments()

    def whole_model(self) -> dict[str, Any]:
        return self._average.whole_model() if self._are_apart() else super().whole_model()

    def _are_apart(self) -> bool:
        """*Together.* Whether any rank has taken a step since all were in step.

        Raises `DivergedError` on all ranks if one of them has a gradient that is not finite.
        """
        self._guard.settle()
        found = self._group.gather_json([self._pending, self._culprit is not None])
        if any(has_culprit for _, has_culprit in found):
            raise_together(self._group, self._culprit)
        return any(pending for pending, _ in found)

    def state_dict(self) -> dict[str, Any]:
        state = {
            "steps": self._steps,
            "pending": self._pending,
            "in_round": self._in_round,
            "rounds": self._rounds,
            "weight": self._weight,
            "seconds": time.monotonic() - self._began,
            "period": {"steps": self._period.steps, **self._period.state_dict()},
            "average": self._average.state_dict(),
            "losses": self._losses.state_dict(),
            # Rank 0's moments are in the checkpoint for all; with `moments=keep` each rank has its
            # own, also right after a meeting.
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # not all of them are averaged
        }
        if self._are_apart():
            state["model"] = self.model.state_dict()
        if self._outer is not None:
            state["outer"] = self._outer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "model" in state:
            self.model.load_state_dict(state["model"])
        load_buffers(self.model, state["buffers"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._begun = True
        self._steps, self._pending = state["steps"], state["pending"]
        self._in_round, self._rounds = state["in_round"], state["rounds"]
        self._weight = state["weight"]
        self._began = time.monotonic() - state["seconds"]
        self._period.steps = state["period"]["steps"]
        self._period.load_state_dict(state["period"])
        self._average.load_state_dict(state["average"])
        self._losses.load_state_dict(state["losses"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        self.notes.append({"period": self._period.steps})


def loss_is_missing() -> UserError:
    return UserError(
        "this strategy steers by the loss, and nobody has told it one. Call run.observe_loss(loss) "
        "after each batch, or run.log(loss=…) after each epoch."
    )

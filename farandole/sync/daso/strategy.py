"""DASO: hosts exchange their models now and then, behind the computation's back.

Inside a host, gradients are averaged in every step, through memory or NVLink, where that is cheap.
Between hosts, where it is dear, `crossing` exchanges models without anybody waiting, and `cycle`
says when. While it warms up and cools down the run is synchronous: gradients are averaged over all
ranks in every backward pass.

At the end of each pass over the data all ranks are brought in step, with their statistics and the
optimizer's moments, so that what is evaluated and saved is one model.

Steps are counted by backward passes: a gradient scaler may skip a step on one host only.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.futures import Future
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.allreduce.reductions import Average, Reduction, is_trained, settled
from farandole.sync.allreduce.strategy import AllReduce
from farandole.sync.base import Strategy, Synchronizer, require_at_least, require_share
from farandole.sync.common.codec_option import CODEC, understood
from farandole.sync.common.flat import load_buffers
from farandole.sync.common.guard import Culprit, GradientGuard, diverged, stop
from farandole.sync.common.hooks import ForwardHook
from farandole.sync.common.weighing import Weighing
from farandole.sync.daso.cycle import Cycle, CycleRule, Phase
from farandole.sync.daso.host_exchange import HostExchange
from farandole.sync.periodic.average import ModelAverage
from farandole.sync.periodic.base import loss_is_missing
from farandole.sync.periodic.local import known, prepare
from farandole.sync.periodic.losses import Losses
from farandole.sync.periodic.meeting import (
    RankStatus,
    ask_everyone,
    loss_of,
    raise_together,
    require_sound,
    sick_parameter,
    word_of,
)


@dataclasses.dataclass(frozen=True)
class Daso(Strategy):
    """Synchronous inside hosts, asynchronous between them."""

    name: ClassVar[str] = "daso"

    every: int = 4  # steps between exchanges at first: B
    longest: int = 8  # and after a plateau at 1
    wait: int | None = None  # steps that an exchange may take: S; None: a quarter of B, at least 1
    warmup: float = 0.1  # this share of the run is synchronous, at its beginning
    cooldown: float = 0.1  # and this one at its end; run.epochs knows where that is
    patience: int = 3  # epochs without enough improvement until B is halved
    improvement: float = 0.05
    codec: Codec | str | None = dataclasses.field(
        default=None, metadata=CODEC
    )  # of what travels between hosts

    def __post_init__(self) -> None:
        for option in ("every", "longest", "patience"):
            require_at_least(self, option, 1)
        if self.wait is not None:
            require_at_least(self, "wait", 1)
        for option in ("warmup", "cooldown", "improvement"):
            require_share(self, option)
        if self.warmup + self.cooldown > 1:
            raise UserError(
                f"daso: warmup={self.warmup:g} and cooldown={self.cooldown:g} are more than the "
                "whole run."
            )
        object.__setattr__(self, "codec", understood(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        if len(group.topology.hosts) == 1 or not is_trained(model):
            if group.rank == 0 and len(group.topology.hosts) == 1:
                warnings.warn(
                    f"daso is for several hosts, and all {group.size} ranks are on "
                    f"{group.topology}: it trains by all-reduce. (`farandole run --hosts 2` "
                    "declares two on one machine.)",
                    stacklevel=3,
                )
            return AllReduce().build(model, optimizer, group)
        given = prepare(self, model, optimizer, group, known(self.codec))
        return _DasoAtWork(self, model, given, group)

    @property
    def rule(self) -> CycleRule:
        return CycleRule(
            self.every,
            self.longest,
            self.wait,
            self.warmup,
            self.cooldown,
            self.patience,
            self.improvement,
        )


class _DasoAtWork(Synchronizer):
    def __init__(self, config: Daso, model: nn.Module, optimizer: Optimizer, group: Group) -> None:
        self._group = group
        self._optimizer = optimizer
        self._cycle = Cycle(config.rule)
        self._phase: Phase = "warm-up"
        self._crossing = HostExchange(model, group, known(config.codec))
        self._average = ModelAverage(model, optimizer, group)
        self._gradients = _ByPhase(group, self._crossing.local)
        reducer = GradientReducer(
            model, group, self._gradients, optimizer=optimizer, spread_buffers=False
        )
        self._guard = GradientGuard(model, optimizer, group, reducer, self._on_culprit)
        self._steps = 0
        self._guard.count = lambda: self._steps + 1
        self._culprit: Culprit | None = None  # on this host; to be told with the next exchange
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
            return  # somebody has only had a look at the data
        self._passes += 1
        self._steps_before_pass = self._steps
        if self._passes < 2:
            return
        loss = self._epoch_loss
        if loss is None:  # the script may have logged it since
            loss = loss_of(ask_everyone(self._group, self._word()))
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
        if self._phase == "cycling":
            self._bring_in_step()
        self._phase = phase
        self._set_gradients()
        if phase == "cycling":
            self._since = 0
            self._crossing.begin()
        self._note()

    def _set_gradients(self) -> None:
        if self._phase == "cycling":
            self._gradients.average_in_host()
        else:
            self._gradients.average_everywhere()

    def _count(self) -> None:
        """After a step, or where one was skipped, before whatever comes next."""
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
        self._crossing.step()
        if self._crossing.under_way and self._crossing.age >= self._cycle.wait:
            self._merge()
        if not self._crossing.under_way and self._since >= self._cycle.period:
            self._note_parameter(self._crossing.culprit())
            self._crossing.start(spoiled=self._guard.is_on and self._culprit is not None)
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
        self._culprit = self._culprit or sick_parameter(self._guard, self._steps, name)

    def _merge(self) -> None:
        """All ranks merge the same average, so all see whether it is finite."""
        is_finite = self._crossing.arrive()
        if self._guard.is_on and not is_finite:
            raise_together(self._group, self._culprit)
            raise diverged(self._guard.rank, self._steps, "the average of the hosts' models")
        self._crossing.merge()

    def _bring_in_step(self) -> None:
        self._guard.settle()
        if self._crossing.under_way:
            self._merge()
        self._note_parameter(self._average.gather())
        said = ask_everyone(self._group, self._word(sound=self._culprit is None))
        require_sound(self._group, self._guard, said, self._culprit)
        self._epoch_loss = loss_of(said) if any(word.loss_count for word in said) else None
        if self._apart:
            self._average.average()
            if said[0].moments and len({word.moments for word in said}) == 1:
                self._average.average_moments()
        else:
            self._average.average_statistics()
        self._average.scatter()
        self._apart = False
        self._since = 0
        if self._phase == "cycling":
            self._crossing.begin()

    def _word(self, *, sound: bool = True) -> RankStatus:
        return word_of(
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
            "crossing": self._crossing.state_dict(),
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
        self._crossing.load_state_dict(state["crossing"])
        self._note()


class _ByPhase(Reduction):
    """Averages gradients over all ranks, or over those of this host."""

    def __init__(self, group: Group, local: Group | None) -> None:
        # Memory can be registered with one group only: that of the many steps.
        self._everywhere = Average(group, register=local is None)
        self._here = Average(local) if local is not None else None
        self._in_host = False
        self.done = False  # a backward pass has ended that nobody has counted yet

    def average_everywhere(self) -> None:
        self._in_host = False

    def average_in_host(self) -> None:
        self._in_host = True

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        if bucket.is_last:
            self.done = True
        if not self._in_host:
            return self._everywhere.reduce(bucket)
        return self._here.reduce(bucket) if self._here is not None else settled(bucket.buffer)

    def close(self) -> None:
        self._everywhere.close()
        if self._here is not None:
            self._here.close()

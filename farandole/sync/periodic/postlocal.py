"""Post-local SGD: all-reduce first, local steps later.

Early on, ranks that train alone drift apart; after the first fall of the learning rate they no
longer do, and are said to find flatter minima (Lin et al., 2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.allreduce.reductions import Average, may_be_trained
from farandole.sync.base import (
    Strategy,
    Synchronizer,
    require_at_least,
    require_choices,
    require_share,
)
from farandole.sync.common.codec_option import CODEC, read_codec
from farandole.sync.common.guard import Culprit, stop
from farandole.sync.periodic.base import Moments, Periodic, Rule
from farandole.sync.periodic.local import known, prepare, require_momentum
from farandole.sync.periodic.outer import block_momentum
from farandole.sync.periodic.period import Period


@dataclasses.dataclass(frozen=True)
class PostLocal(Strategy):
    """All-reduce until the rate falls, then local SGD."""

    name: ClassVar[str] = "postlocal"

    every: int = 8  # steps between averages, once they are local
    below: float = 0.5  # local as soon as the rate is at most this share of its highest
    at: float | None = None  # or from this share of the whole run on, whatever the rate
    momentum: float = 0.0
    moments: Moments = "keep"
    codec: Codec | str | None = dataclasses.field(default=None, metadata=CODEC)  # of the averages
    meet_epochs: bool = True

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(self, "every", 1)
        require_momentum(self, "momentum")
        if not 0 < self.below < 1:
            raise UserError(f"postlocal: below={self.below:g} must be between 0 and 1.")
        if self.at is not None:
            require_share(self, "at")
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        codec = known(self.codec)
        given = prepare(self, model, optimizer, group, codec)
        outer = block_momentum(self.momentum)
        rule = Rule(self.moments, codec, outer, meet_epochs=self.meet_epochs)
        return _PostLocalAtWork(self, model, given, group, rule)


class _PostLocalAtWork(Periodic):
    def __init__(
        self, config: PostLocal, model: nn.Module, optimizer: Optimizer, group: Group, rule: Rule
    ) -> None:
        super().__init__(model, optimizer, group, Period(config.every), rule)
        self._config = config
        self._highest_rate = 0.0
        self._progress: float | None = None
        self._local = False
        self.notes[:] = [{"phase": "synchronous", "period": 1}]
        if group.size > 1 and may_be_trained(model):
            self._reducer = GradientReducer(model, group, Average(group), optimizer=optimizer)
            self._guard.reducer = self._reducer

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        super().begin_step(weight, progress, samples)
        self._progress = progress
        if not self._local and self._is_time():
            self._go_local()

    def end_pass(self) -> None:
        if self._local:
            super().end_pass()
        else:
            Synchronizer.end_pass(self)

    def _stepped(self) -> None:
        if self._local:
            super()._stepped()
            return
        self._steps += 1
        self._highest_rate = max(self._highest_rate, self._rate())
        if self._is_time():
            self._go_local()

    def _on_culprit(self, found: Culprit) -> None:
        if self._local:
            super()._on_culprit(found)
        else:  # it is in an average, and all ranks have found it
            stop(found)

    def _is_time(self) -> bool:
        if self._config.at is not None:
            return self._progress is not None and self._progress >= self._config.at
        highest = self._highest_rate  # 0 before the first step, and where a warm-up begins
        return highest > 0 and self._rate() <= self._config.below * highest

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _go_local(self) -> None:
        self._local = True
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = self._guard.reducer = None
        # The ranks are in step here, after a synchronous step: a common base, without a collective.
        self._average.start_here()
        self.notes.append({"phase": "local", "period": self._period.steps})

    def state_dict(self) -> dict[str, Any]:
        own = {"local": self._local, "highest_rate": self._highest_rate}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Before the rest is loaded: it removes the reducer, and sets a base that is then replaced.
        if state["local"] and not self._local:
            self._go_local()
        self._highest_rate = state["highest_rate"]
        super().load_state_dict(state)
        self.notes.pop()

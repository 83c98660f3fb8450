"""AdaComm: meet rarely while the loss is high, and ever more often as it falls.

Every interval (so many seconds, or steps), with τ₀ the first period, F₀ the first loss and F the
loss now:

    τ ← ⌈ √(F / F₀) · τ₀ ⌉         and if that is no less than before:    τ ← ⌈ shrink · τ ⌉

When the learning rate has fallen from η₀ to η, the root is of (η₀ / η) · F / F₀: small steps keep
ranks together by themselves. Wang and Joshi (2019) also put off the fall of the rate until τ = 1;
`rate=defer` does that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.base import Strategy, Synchronizer, require_at_least, require_choices
from farandole.sync.common.codec_option import CODEC, read_codec
from farandole.sync.periodic.base import Moments, Periodic, Rule
from farandole.sync.periodic.local import known, prepare, require_momentum
from farandole.sync.periodic.meeting import RankStatus, loss_of
from farandole.sync.periodic.outer import block_momentum
from farandole.sync.periodic.period import Note, Period

_BATCHES_FOR_A_LOSS = 20  # on each rank: fewer are too noisy to steer by

_PATIENCE = 3  # intervals without a loss

Coupling = Literal["couple", "defer", "ignore"]


@dataclasses.dataclass(frozen=True)
class AdaComm(Strategy):
    """Local SGD with a period that follows the loss down."""

    name: ClassVar[str] = "adacomm"

    start: int = 16  # the first period, in steps
    seconds: float = 60.0  # between decisions
    steps: int | None = None  # between decisions, instead of seconds
    shrink: float = 0.5  # of the period, where the loss alone would not shorten it
    rate: Coupling = "couple"  # what a falling learning rate does to the period, or waits for
    momentum: float = 0.0
    moments: Moments = "keep"
    codec: Codec | str | None = dataclasses.field(default=None, metadata=CODEC)
    meet_epochs: bool = True

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(self, "start", 1)
        require_momentum(self, "momentum")
        if self.steps is not None:
            require_at_least(self, "steps", 1)
        if not 0 < self.seconds < math.inf:
            raise UserError(f"adacomm: seconds={self.seconds:g} must be above 0, such as 60.")
        if not 0 < self.shrink < 1:
            raise UserError(f"adacomm: shrink={self.shrink:g} must be between 0 and 1.")
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        codec = known(self.codec)
        given = prepare(self, model, optimizer, group, codec)
        outer = block_momentum(self.momentum)
        rule = Rule(self.moments, codec, outer, meet_epochs=self.meet_epochs)
        period = FallingPeriod(self)
        if self.rate == "defer":
            defer_rates(given, period)
        return Periodic(model, given, group, period, rule)


class FallingPeriod(Period):
    """The rule above, applied at meetings.

    Everything that it decides by comes from `said`: the loss of all ranks, and the clock and the
    rate of rank 0. Clocks differ between ranks, and a rank that decided by its own would come to
    the next meeting at another step than the others.
    """

    def __init__(self, config: AdaComm) -> None:
        super().__init__(config.start)
        self._config = config
        self._first_loss: float | None = None
        self._highest_rate = 0.0  # not the first: it may have warmed up
        self._recent: list[tuple[float, float]] = []  # mean loss and batches, of late meetings
        self._reported = False  # ever: then what is logged does not count
        self._logs = 0.0
        self._decided_at = 0.0  # in seconds or in steps
        self._missed = 0  # decisions that could not be made, for want of a loss
        self.highest_rates: list[float] = []  # of each parameter group, where they are deferred

    @property
    def lacks_loss(self) -> bool:
        return self._first_loss is None

    @property
    def is_overdue(self) -> bool:
        return self.lacks_loss and self._missed >= _PATIENCE

    def after(self, said: Sequence[RankStatus]) -> Note | None:
        self._listen(said)
        self._highest_rate = max(self._highest_rate, said[0].rate)
        now = said[0].seconds
        interval = self._config.seconds
        if self._config.steps is not None:
            now, interval = max(status.steps for status in said), float(self._config.steps)
        # A meeting without steps since the last one (at the end of a pass) brings nothing new.
        if now - self._decided_at < interval or not any(status.pending for status in said):
            return None
        self._decided_at = now
        if self._first_loss is None:
            self._missed += 1
            return None
        return self._decide(said[0].rate)

    def _listen(self, said: Sequence[RankStatus]) -> None:
        loss = loss_of(said)
        batches = max(status.loss_count for status in said)
        # Once batches are reported, a meeting without a report must not fall back on what the
        # script logs: that may be the loss of an evaluation, and would be compared with F₀.
        self._reported = self._reported or batches > 0
        if loss is None or not math.isfinite(loss) or (self._reported and not batches):
            return
        if self._first_loss is None:
            self._first_loss = loss
        if batches:
            self._recent.append((loss, batches))
            while sum(b for _, b in self._recent[1:]) >= _BATCHES_FOR_A_LOSS:
                self._recent.pop(0)
        elif said[0].logs != self._logs:  # logged since the last meeting, and not the same again
            self._recent = [(loss, 1.0)]
        self._logs = said[0].logs

    def _decide(self, rate: float) -> Note:
        assert self._first_loss is not None
        batches = sum(b for _, b in self._recent)
        loss = sum(value * b for value, b in self._recent) / batches
        ratio = loss / self._first_loss if self._first_loss > 0 else 0.0
        formula = f"{loss:.4g}/{self._first_loss:.4g}"
        if self._config.rate == "couple" and rate > 0:
            ratio *= self._highest_rate / rate
            if rate != self._highest_rate:
                formula = f"{self._highest_rate:g}/{rate:g}·{formula}"
        wanted = math.sqrt(max(0.0, ratio)) * self._config.start
        before = self.steps
        # Never longer than before, and never below 1. The small number keeps a root that is whole
        # but for rounding from being rounded up by one.
        self.steps = max(1, math.ceil(min(wanted, before) - 1e-9))
        why = f"√({formula})·{self._config.start} = {wanted:.1f}"
        if self.steps >= before:
            self.steps = max(1, math.ceil(self._config.shrink * before))
            why += f", no less than {before}: {self._config.shrink:g} of that"
        return {"period": self.steps, "loss": loss, "why": why}

    def state_dict(self) -> dict[str, Any]:
        return {
            "first_loss": self._first_loss,
            "highest_rate": self._highest_rate,
            "recent": [list(pair) for pair in self._recent],
            "reported": self._reported,
            "logs": self._logs,
            "decided_at": self._decided_at,
            "highest_rates": self.highest_rates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first_loss, self._highest_rate = state["first_loss"], state["highest_rate"]
        self._recent = [(loss, batches) for loss, batches in state["recent"]]
        self._reported = state["reported"]
        self._logs, self._decided_at = state["logs"], state["decided_at"]
        self.highest_rates = state["highest_rates"]


def defer_rates(optimizer: Optimizer, period: FallingPeriod) -> None:
    """While the period is above 1, steps are taken at the highest rates so far.

    The rates are put back after each step, so that a scheduler never sees them.
    """
    scheduled: list[Any] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scheduled[:] = [group["lr"] for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            if index == len(period.highest_rates):  # at first, or when a group was added
                period.highest_rates.append(0.0)
            highest = max(period.highest_rates[index], float(group["lr"]))
            period.highest_rates[index] = highest
            if period.steps > 1 and float(group["lr"]) < highest:
                group["lr"] = highest

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)

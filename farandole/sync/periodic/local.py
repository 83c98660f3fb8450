"""Local SGD and its fixed-period kin: what differs is the rule by which models are averaged."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.base import (
    Strategy,
    Synchronizer,
    require_at_least,
    require_choices,
    require_optimizer,
)
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.sync.common.codec_option import CODEC, check_compressible, read_codec
from farandole.sync.periodic.base import Moments, Periodic, Rule
from farandole.sync.periodic.outer import OuterRule, block_momentum
from farandole.sync.periodic.period import Period


@dataclasses.dataclass(frozen=True)
class Local(Strategy):
    """Every rank trains alone for `every` steps; then the models are averaged."""

    name: ClassVar[str] = "local"

    every: int = 8
    momentum: float = 0.0  # block momentum, over the averages
    moments: Moments = "keep"  # what becomes of the optimizer's own state at each average
    codec: Codec | str | None = dataclasses.field(default=None, metadata=CODEC)
    meet_epochs: bool = True  # also average at the end of each pass over the data

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(self, "every", 1)
        require_momentum(self, "momentum")
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        return put_to_work(self, model, optimizer, group, Period(self.every), self.rule)

    @property
    def rule(self) -> Rule:
        outer = block_momentum(self.momentum)
        return Rule(self.moments, known(self.codec), outer, meet_epochs=self.meet_epochs)


@dataclasses.dataclass(frozen=True)
class DiLoCo(Strategy):
    """Many local steps, then one step of Nesterov's method with what all ranks have learned."""

    name: ClassVar[str] = "diloco"

    every: int = 500
    rate: float = 0.7  # of the outer step
    momentum: float = 0.9
    moments: Moments = "keep"
    codec: Codec | str | None = dataclasses.field(default=None, metadata=CODEC)
    meet_epochs: bool = True

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(self, "every", 1)
        require_momentum(self, "momentum")
        if not 0 < self.rate < float("inf"):
            raise UserError(f"diloco: rate={self.rate:g} must be above 0, such as 0.7.")
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        outer = OuterRule(self.rate, self.momentum, nesterov=True)
        rule = Rule(self.moments, known(self.codec), outer, meet_epochs=self.meet_epochs)
        return put_to_work(self, model, optimizer, group, Period(self.every), rule)


@dataclasses.dataclass(frozen=True)
class Federated(Strategy):
    """Federated averaging: in each round the work of some ranks counts, by their samples.

    The others' work of that round is thrown away, as if they had been switched off.
    """

    name: ClassVar[str] = "federated"

    every: int = 8
    fraction: float = 0.5  # of the ranks, drawn anew for each round
    seed: int = 0
    moments: Moments = "keep"
    codec: Codec | str | None = dataclasses.field(default=None, metadata=CODEC)
    meet_epochs: bool = True

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(self, "every", 1)
        if not 0 < self.fraction <= 1:
            raise UserError(
                f"federated: fraction={self.fraction:g} must be above 0 and at most 1: the share "
                "of the workers that take part in a round."
            )
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        rule = Rule(
            self.moments,
            known(self.codec),
            fraction=self.fraction,
            seed=self.seed,
            meet_epochs=self.meet_epochs,
        )
        return put_to_work(self, model, optimizer, group, Period(self.every), rule)


def put_to_work(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer | None,
    group: Group,
    period: Period,
    rule: Rule,
) -> Periodic:
    """The same model on all ranks, under `rule`."""
    given = prepare(strategy, model, optimizer, group, rule.codec)
    return Periodic(model, given, group, period, rule)


def prepare(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer | None,
    group: Group,
    codec: Codec | None,
) -> Optimizer:
    """Checks what a strategy that averages models needs, and starts all ranks from rank 0's."""
    given = require_optimizer(strategy, optimizer)
    check_same_model(model, group)
    if codec is not None:
        check_compressible(model, codec)
    spread_from_first(model, given, group)
    return given


def known(codec: Codec | str | None) -> Codec | None:
    """After `__post_init__` a text has become a codec."""
    assert not isinstance(codec, str)
    return codec


def require_momentum(strategy: Strategy, option: str) -> None:
    value = getattr(strategy, option)
    if not 0 <= value < 1:
        raise UserError(f"{strategy.name}: {option}={value:g} must be 0 or more, and below 1.")

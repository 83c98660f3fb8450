"""DASO: hosts exchange their models now and then, while they go on computing.

Inside a host, gradients are averaged in every step, through memory or NVLink, where that is cheap.
Between hosts, where it is dear, `host_exchange` exchanges models without anybody waiting, and
`cycle` says when. While it warms up and cools down the run is synchronous: gradients are averaged
over all ranks in every backward pass. `synchronizer` puts these together.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.errors import UserError
from farandole.sync.allreduce.reductions import is_trained
from farandole.sync.allreduce.strategy import AllReduce
from farandole.sync.base import Strategy, Synchronizer, require_at_least, require_share
from farandole.sync.common.codec_option import CODEC, read_codec
from farandole.sync.daso.cycle import CycleRule
from farandole.sync.daso.synchronizer import DasoSynchronizer
from farandole.sync.periodic.local import known, prepare


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
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        if len(group.topology.hosts) == 1 or not is_trained(model):
            if group.rank == 0 and len(group.topology.hosts) == 1:
                warnings.warn(
                    f"daso is for several hosts, and all {group.size} ranks are on "
                    f"{group.topology}: it trains by all-reduce. (`farandole run --pretend-hosts "
                    "2` declares two on one machine.)",
                    stacklevel=3,
                )
            # Also where all is frozen so far: such a model, as a teacher, may have no optimizer.
            return AllReduce().build(model, optimizer, group)
        given = prepare(self, model, optimizer, group, known(self.codec))
        return DasoSynchronizer(self.rule, known(self.codec), model, given, group)

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

"""Synchronous data parallelism: average the gradients of all ranks in every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec
from farandole.comm.transports.base import NATIVE
from farandole.errors import UserError, nearest
from farandole.schedule import ALGORITHMS
from farandole.sync.allreduce.compressed import Compressed
from farandole.sync.allreduce.kept_gradients import KeptGradients
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.allreduce.reductions import Average, Reduction, may_be_trained
from farandole.sync.base import Strategy, Synchronizer, require_choices
from farandole.sync.common.alignment import check_same_model, spread_from_first
from farandole.sync.common.batchnorm import synchronise_batchnorm
from farandole.sync.common.codec_option import CODEC, check_compressible, read_codec
from farandole.sync.common.guard import GradientGuard
from farandole.sync.common.weighing import Weighing


@dataclasses.dataclass(frozen=True)
class AllReduce(Strategy):
    """Gradients are averaged over all ranks during every backward pass."""

    name: ClassVar[str] = "allreduce"

    @property
    def why_not_elastic(self) -> str | None:
        if self.codec is not None:
            return f"what {self.codec} keeps back on a rank would be lost with it"
        if self.batchnorm == "sync":
            return "batchnorm=sync uses other ranks' samples within a forward pass"
        return None

    bucket_mib: float | None = None  # size of the pieces; None: 1 MiB, then 25 MiB
    batchnorm: Literal["local", "sync"] = "local"  # statistics of a rank, or of all ranks
    algorithm: str = "auto"  # the all-reduce, by name
    codec: Codec | str | None = dataclasses.field(
        default=None, metadata=CODEC
    )  # how gradients are compressed; or its text

    def __post_init__(self) -> None:
        require_choices(self)
        if self.bucket_mib is not None and not 0 < self.bucket_mib < math.inf:  # nor NaN
            raise UserError(f"allreduce: bucket_mib={self.bucket_mib:g} must be above 0.")
        known = [*ALGORITHMS, NATIVE, "auto"]
        if self.algorithm not in known:
            raise UserError(
                f"allreduce: there is no algorithm {self.algorithm!r}. "
                f"{nearest(self.algorithm, known)}"
            )
        object.__setattr__(self, "codec", read_codec(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        check_same_model(model, group)
        if isinstance(self.codec, Codec):
            check_compressible(model, self.codec)
        weighing = Weighing(model)
        if self.batchnorm == "sync" and group.size > 1:
            model = synchronise_batchnorm(model, group, weighing)
        spread_from_first(model, optimizer, group)
        alone = group.size == 1 and group.units is None  # in an elastic job others may come
        if alone or not may_be_trained(model):  # there is nothing to average
            return Synchronizer(model, guard=GradientGuard(model, optimizer, group))
        return _AllReduceAtWork(self, model, optimizer, group, weighing)


class _AllReduceAtWork(Synchronizer):
    def __init__(
        self,
        config: AllReduce,
        model: nn.Module,
        optimizer: Optimizer | None,
        group: Group,
        weighing: Weighing,
    ) -> None:
        self._group = group
        self._optimizer = optimizer
        reduction: Reduction = Average(group, config.algorithm)
        if isinstance(config.codec, Codec):
            reduction = Compressed(group, config.codec.build(config.algorithm))
        elif group.units is not None:
            reduction = KeptGradients(group, Average(group, config.algorithm), group.units)
        self._compressed = reduction if isinstance(reduction, Compressed) else None
        self._kept = reduction if isinstance(reduction, KeptGradients) else None
        reducer = GradientReducer(
            model, group, reduction, optimizer=optimizer, bucket_mib=config.bucket_mib
        )
        guard = GradientGuard(model, optimizer, group, reducer)
        super().__init__(model, weighing, reducer, guard)

    def regroup(self, order: list[str] | None) -> None:
        assert self._reducer is not None
        assert self.guard is not None
        self._reducer.regroup(order)
        self.guard.ranks = range(self._group.size)

    def rescale(self, factor: float, *, within_step: bool) -> None:
        super().rescale(factor, within_step=within_step)
        if within_step and self._kept is not None:
            self._kept.factor *= factor

    def state_dict(self) -> dict[str, Any]:
        """Without a codec, all-reduce remembers nothing between steps."""
        return {} if self._compressed is None else {"codec": self._compressed.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._compressed is not None:
            self._compressed.load_state_dict(state["codec"])

    def work_beside(self, other: Optimizer) -> None:
        if self._compressed is not None:
            self._compressed.work_beside(self._optimizer, other)

"""Synchronous data parallelism: average the gradients of all ranks in every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec, Compressor
from farandole.comm.transport import NATIVE
from farandole.errors import UserError, nearest
from farandole.schedule import ALGORITHMS
from farandole.sync.alignment import check_same_model, spread_from_first
from farandole.sync.batchnorm import synchronise_batchnorm
from farandole.sync.coding import CODEC, check_compressible, understood
from farandole.sync.gradients import (
    Average,
    Compressed,
    Reduction,
    averaging,
    is_trained,
    names_by_parameter,
)
from farandole.sync.strategy import Strategy, Synchronizer, require_choices
from farandole.sync.weighing import Weighing


@dataclasses.dataclass(frozen=True)
class AllReduce(Strategy):
    """Gradients are averaged over all ranks during every backward pass."""

    name: ClassVar[str] = "allreduce"

    bucket_mib: float | None = None  # gradients travel in pieces of this size; None: DDP's choice
    batchnorm: Literal["local", "sync"] = "local"  # statistics of a rank, or of all ranks
    unused: bool = False  # some parameters get no gradient in some steps
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
        object.__setattr__(self, "codec", understood(self.name, self.codec))

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        check_same_model(model, group)
        if isinstance(self.codec, Codec):
            check_compressible(model, self.codec)
        if self.batchnorm == "sync" and group.size > 1:
            model = synchronise_batchnorm(model, group)
        spread_from_first(model, optimizer, group)
        if group.size == 1 or not is_trained(model):
            return Synchronizer(model, model)  # there is nothing to average
        return _AllReduceAtWork(self, model, group)


class _AllReduceAtWork(Synchronizer):
    def __init__(self, config: AllReduce, model: nn.Module, group: Group) -> None:
        self._compressor: Compressor | None = None
        reduction: Reduction = Average(group, config.algorithm)
        if isinstance(config.codec, Codec):
            self._compressor = config.codec.build(config.algorithm)
            reduction = Compressed(group, self._compressor, names_by_parameter(model))
        ddp = averaging(model, group, reduction, bucket_mib=config.bucket_mib, unused=config.unused)
        self._weighing = Weighing()
        self._weighing.follow(ddp)
        super().__init__(ddp, model)

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        self._weighing.weight = weight

    def end_pass(self) -> None:
        self._weighing.weight = 1.0

    def no_sync(self) -> AbstractContextManager[None]:
        ddp = self.model
        return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Without a codec, all-reduce remembers nothing between steps."""
        return {} if self._compressor is None else {"codec": self._compressor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._compressor is not None:
            self._compressor.load_state_dict(state["codec"])

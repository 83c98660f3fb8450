"""BatchNorm over the samples of all ranks, in Horovod's words.

The arithmetic is `farandole.sync`'s; here are the sums, as named collectives. As in Horovod, the
gradients of weight and bias are those of this rank's samples: `DistributedOptimizer` averages them
like all others.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.mpi_ops import Sum, allreduce_
from farandole.sync.common.batchnorm import Part, SummedBatchNorm, replace_batchnorm


class SyncBatchNorm(SummedBatchNorm):
    """Takes the place of BatchNorm1d, 2d and 3d, on any device; ranks may have batches of different
    sizes. In evaluation, and where there is one rank only, it is torch's own."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self._place: tuple[weakref.ref[session.Session], int] | None = None

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Replaces every BatchNorm in `module`, in place; returns the module (or its replacement).

        Parameters and buffers stay the same objects, so an optimizer may have been made before.
        """

        def replacement(old: _BatchNorm) -> SyncBatchNorm:
            new = cls.taking_over(old)
            new.process_set = process_set
            return new

        return replace_batchnorm(module, replacement)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and session.current().size_of(self.process_set) == 1:
            self._check_input_dim(input)
            return _BatchNorm.forward(self, input)
        return super().forward(input)

    def sum_over_ranks(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        name = f"sync_batch_norm.{self._number()}.{part}"
        return allreduce_(tensor, name=name, op=Sum, process_set=self.process_set)

    def _number(self) -> int:
        """This layer's among all that have been used since `hvd.init()`, on every rank the same.

        Not since it was made: workers that came later have made fewer layers, or others.
        """
        here = session.current()
        if self._place is None or self._place[0]() is not here:
            key = (0, "sync_batch_norm")
            self._place = (weakref.ref(here), here.counters[key])
            here.counters[key] += 1
        return self._place[1]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another layer, and gets another number."""
        return {**self.__dict__, "_place": None}

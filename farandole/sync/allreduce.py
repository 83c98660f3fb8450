"""Synchronous data parallelism: average the gradients of all ranks in every step.

PyTorch's DDP does the work (buckets, overlap with the backward pass, unused parameters, mixed
precision). Our communication hook counts bytes and measures waiting. A batch that is larger or
smaller than the other ranks' counts for what it holds: its weight scales the gradient where it
enters the model, at the output, so it is exact under accumulation and shared BatchNorm too. Where
the gradient leaves the model, at an input, the weight is taken out again: the input may be the
output of another distributed model, such as a generator's image at its discriminator.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.meter import GradientWait
from farandole.errors import UserError
from farandole.sync.alignment import check_same_model, spread_from_first
from farandole.sync.batchnorm import synchronise_batchnorm
from farandole.sync.strategy import Strategy, Synchronizer


@dataclasses.dataclass(frozen=True)
class AllReduce(Strategy):
    """Gradients are averaged over all ranks during every backward pass."""

    name: ClassVar[str] = "allreduce"

    bucket_mib: float | None = None  # gradients travel in pieces of this size; None: DDP's choice
    batchnorm: Literal["local", "sync"] = "local"  # statistics of a rank, or of all ranks
    unused: bool = False  # some parameters get no gradient in some steps

    def __post_init__(self) -> None:
        if self.bucket_mib is not None and not 0 < self.bucket_mib < math.inf:  # nor NaN
            raise UserError(f"allreduce: bucket_mib={self.bucket_mib:g} must be above 0.")

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        check_same_model(model, group)
        if self.batchnorm == "sync" and group.size > 1:
            model = synchronise_batchnorm(model, group)
        spread_from_first(model, optimizer, group)
        return _AllReduceAtWork(self, model, group)


class _AllReduceAtWork:
    def __init__(self, config: AllReduce, model: nn.Module, group: Group) -> None:
        self.unwrapped = model
        self._weight = 1.0
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        if group.size == 1 or not trainable:
            self.model = model  # there is nothing to average
            return
        ddp = DistributedDataParallel(
            model,
            process_group=group.process_group,
            bucket_cap_mb=config.bucket_mib,  # a float works too
            find_unused_parameters=config.unused,
            gradient_as_bucket_view=True,
            init_sync=False,  # `build` has checked and spread the model already
        )
        ddp.register_comm_hook(_Reduction(group), _average)
        ddp.register_forward_pre_hook(self._unweigh_inputs, with_kwargs=True)
        ddp.register_forward_hook(self._weigh_output)
        self.model = ddp

    def weigh(self, weight: float) -> None:
        self._weight = weight

    def _unweigh_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if self._weight == 1.0 else _scaled((args, kwargs), 1 / self._weight)

    def _weigh_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._weight == 1.0 else _scaled(output, self._weight)

    def no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All-reduce remembers nothing between steps."""


def _scaled(value: Any, factor: float) -> Any:
    """The same value; gradients that flow back through its tensors are multiplied by `factor`."""

    def scaled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            # A copy, because the hook must not outlive the step on a parameter that the model
            # returns as it is, nor touch gradients that reach an input by another way.
            leaf = leaf.clone()
            leaf.register_hook(functools.partial(torch.mul, factor))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaf = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(leaf, field.name, _scaled(getattr(leaf, field.name), factor))
        return leaf

    return pytree.tree_map(scaled, value)


class _Reduction:
    """What the communication hook needs to know."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.wait = GradientWait(group.meter)


def _average(reduction: _Reduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """Runs once per bucket, while the backward pass goes on.

    DDP compares these annotations with the types themselves, so this file must not turn
    annotations into text.
    """
    buffer = bucket.buffer()
    # One multiplication by 1/size, as DDP itself does, so that the bits are DDP's too.
    buffer.mul_(1.0 / reduction.group.size)
    reduction.wait.begin(buffer, bucket.is_last())

    def arrived(done: Future[torch.Tensor]) -> torch.Tensor:
        reduction.wait.end()
        return done.value()

    return reduction.group.all_reduce_future(buffer).then(arrived)

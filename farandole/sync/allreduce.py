"""Synchronous data parallelism: average the gradients of all ranks in every step.

PyTorch's DDP does the work (buckets, overlap with the backward pass, unused parameters, mixed
precision). Our communication hook counts bytes and measures waiting. A batch that is larger or
smaller than the other ranks' counts for what it holds: its weight scales the gradient where it
enters the model, at the output, so it is exact under accumulation and shared BatchNorm too. Where
the gradient leaves the model, at an input, the weight is taken out again: the input may be the
output of another distributed model, such as a generator's image at its discriminator.

A codec compresses each gradient by itself, not each bucket: DDP rebuilds its buckets, and a resumed
run must go on, to the bit, with what was left over of each.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec, Compressor
from farandole.comm.codecs import parse as parse_codec
from farandole.comm.meter import GradientWait
from farandole.comm.transport import NATIVE
from farandole.errors import UserError, nearest
from farandole.schedule import ALGORITHMS
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
    algorithm: str = "auto"  # the all-reduce, by name
    codec: Codec | str | None = dataclasses.field(  # how gradients are compressed; or its text
        default=None, metadata={"parse": parse_codec}
    )

    def __post_init__(self) -> None:
        if self.bucket_mib is not None and not 0 < self.bucket_mib < math.inf:  # nor NaN
            raise UserError(f"allreduce: bucket_mib={self.bucket_mib:g} must be above 0.")
        known = [*ALGORITHMS, NATIVE, "auto"]
        if self.algorithm not in known:
            raise UserError(
                f"allreduce: there is no algorithm {self.algorithm!r}. "
                f"{nearest(self.algorithm, known)}"
            )
        if isinstance(self.codec, str):
            object.__setattr__(self, "codec", parse_codec(self.codec))
        elif self.codec is not None and not isinstance(self.codec, Codec):
            raise UserError(
                f"allreduce: codec={self.codec!r} is no codec. Give one, such as Int8(), or its "
                "text, such as 'int8'."
            )

    def build(self, model: nn.Module, optimizer: Optimizer | None, group: Group) -> Synchronizer:
        check_same_model(model, group)
        if self.codec is not None:
            _check_compressible(model, self.codec)
        if self.batchnorm == "sync" and group.size > 1:
            model = synchronise_batchnorm(model, group)
        spread_from_first(model, optimizer, group)
        return _AllReduceAtWork(self, model, group)


class _AllReduceAtWork:
    def __init__(self, config: AllReduce, model: nn.Module, group: Group) -> None:
        self.unwrapped = model
        self._weight = 1.0
        self._compressor: Compressor | None = None
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
        if isinstance(config.codec, Codec):
            self._compressor = config.codec.build(config.algorithm)
            names: dict[torch.Tensor, str] = {
                parameter: name for name, parameter in model.named_parameters()
            }
            ddp.register_comm_hook(
                _Compression(group, self._compressor, names), _average_compressed
            )
        else:
            reduction = _Reduction(group, config.algorithm)
            weakref.finalize(ddp, reduction.registered.close)
            ddp.register_comm_hook(reduction, _average)
        ddp.register_forward_pre_hook(self._unweigh_inputs, with_kwargs=True)
        ddp.register_forward_hook(self._weigh_output)
        self.model = ddp

    def weigh(self, weight: float) -> None:
        self._weight = weight

    def _unweigh_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if self._weight == 1.0 else _scaled((args, kwargs), 1 / self._weight)

    def _weigh_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._weight == 1.0 else _scaled(output, self._weight)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Without a codec, all-reduce remembers nothing between steps."""
        return {} if self._compressor is None else {"codec": self._compressor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._compressor is not None:
            self._compressor.load_state_dict(state["codec"])


def _check_compressible(model: nn.Module, codec: Codec | str) -> None:
    """Before the training, not in its first backward pass."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UserError(
                f"the codec {codec} compresses gradients of real numbers; {name!r} is "
                f"{parameter.dtype}. Use allreduce without a codec."
            )


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

    def __init__(self, group: Group, algorithm: str) -> None:
        self.group = group
        self.algorithm = algorithm
        self.wait = GradientWait(group.meter, group.trace)
        self.registered = contextlib.ExitStack()
        self._seen: collections.Counter[int] = collections.Counter()

    def meet(self, bucket: GradBucket) -> None:
        """Registers a bucket's memory with the group when it is here to stay.

        DDP makes its buckets anew after the first step. So the third time is the first at which
        it is worth the trouble, and it is the third time on all ranks.
        """
        self._seen[bucket.index()] += 1
        if self._seen[bucket.index()] == 3 and not bucket.buffer().is_cuda:
            self.registered.enter_context(self.group.register(bucket.buffer()))


def _average(reduction: _Reduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """Runs once per bucket, while the backward pass goes on.

    DDP compares these annotations with the types themselves, so this file must not turn
    annotations into text.
    """
    reduction.meet(bucket)
    buffer = bucket.buffer()
    reduction.wait.begin(buffer, bucket.is_last())
    future = reduction.group.average_future(
        buffer, algorithm=reduction.algorithm, last=bucket.is_last()
    )
    return _ending(reduction.wait, future)


class _Compression:
    """What the hook needs to know when there is a codec."""

    def __init__(
        self, group: Group, compressor: Compressor, names: Mapping[torch.Tensor, str]
    ) -> None:
        self.group = group
        self.compressor = compressor
        self.names = names
        self.wait = GradientWait(group.meter, group.trace)


def _average_compressed(compression: _Compression, bucket: GradBucket) -> Future[torch.Tensor]:
    """The same with a codec: each gradient is compressed by itself, known by its name."""
    buffer = bucket.buffer()
    names = [compression.names[parameter] for parameter in bucket.parameters()]
    gradients = dict(zip(names, bucket.gradients(), strict=True))  # views of the buffer
    compression.wait.begin(buffer, bucket.is_last())

    def average() -> torch.Tensor:
        compression.compressor.average(gradients, compression.group)
        return buffer

    if not bucket.is_last() and not buffer.is_cuda:
        return _ending(compression.wait, compression.group.start(average).future)
    # After the last nothing is left to do meanwhile, and what goes wrong here is raised as it is. A
    # GPU's work goes on by itself, and must stay in the order of its stream.
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(average())
    return _ending(compression.wait, future)


def _ending(wait: GradientWait, future: Future[torch.Tensor]) -> Future[torch.Tensor]:
    def arrived(done: Future[torch.Tensor]) -> torch.Tensor:
        wait.end()
        return done.value()

    return future.then(arrived)

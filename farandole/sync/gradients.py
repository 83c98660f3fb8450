"""Gradients that are averaged during the backward pass.

PyTorch's DDP does the work (buckets, overlap with the backward pass, unused parameters, mixed
precision). Our communication hook says what becomes of each bucket: a `Reduction`.
"""

import collections
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from farandole.comm import Group
from farandole.comm.codecs import Compressor
from farandole.comm.meter import GradientWait
from farandole.sync.guard import GradientGuard


class Reduction(ABC):
    """What becomes of the gradients of a bucket. `close` is called when the model is gone."""

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Runs once per bucket, while the backward pass goes on; the future holds its buffer."""

    def close(self) -> None:
        return


def averaging(
    model: nn.Module,
    group: Group,
    reduction: Reduction,
    *,
    bucket_mib: float | None = None,
    unused: bool = False,
    spread_buffers: bool = True,
) -> DistributedDataParallel:
    """`model` in a DDP whose buckets go through `reduction`. Its ranks hold the same model."""
    ddp = DistributedDataParallel(
        model,
        process_group=group.process_group,
        bucket_cap_mb=bucket_mib,  # a float works too
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,
        init_sync=False,
    )
    # Not as an argument: its name is another one from release to release of PyTorch.
    ddp.broadcast_buffers = spread_buffers
    weakref.finalize(ddp, reduction.close)
    ddp.register_comm_hook(reduction, _hook)
    return ddp


def is_trained(model: nn.Module) -> bool:
    """Whether there is anything to average: DDP refuses models without."""
    return any(parameter.requires_grad for parameter in model.parameters())


def names_by_parameter(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _hook(reduction: Reduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """DDP compares these annotations with the types themselves, so this file must not turn
    annotations into text."""
    return reduction.reduce(bucket)


class Average(Reduction):
    """Over all ranks of a group, as they are."""

    def __init__(self, group: Group, algorithm: str = "auto", *, register: bool = True) -> None:
        self._group = group
        self._algorithm = algorithm
        self._register = register
        self._wait = GradientWait(group.meter, group.trace)
        self._registered = contextlib.ExitStack()
        self._seen: collections.Counter[int] = collections.Counter()

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        self._meet(bucket)
        buffer, last = bucket.buffer(), bucket.is_last()
        self._wait.begin(buffer, last)
        future = self._group.average_future(buffer, algorithm=self._algorithm, last=last)
        return _ending(self._wait, future)

    def close(self) -> None:
        self._registered.close()

    def _meet(self, bucket: GradBucket) -> None:
        """Registers a bucket's memory with the group when it is here to stay.

        DDP makes its buckets anew after the first step. So the third time is the first at which
        it is worth the trouble, and it is the third time on all ranks.
        """
        self._seen[bucket.index()] += 1
        here_to_stay = self._seen[bucket.index()] == 3
        if self._register and here_to_stay and not bucket.buffer().is_cuda:
            self._registered.enter_context(self._group.register(bucket.buffer()))


class Compressed(Reduction):
    """The same with a codec: each gradient is compressed by itself, known by its name.

    Not each bucket: DDP rebuilds its buckets, and a resumed run must go on, to the bit, with what
    was left over of each gradient.
    """

    def __init__(
        self, group: Group, compressor: Compressor, names: Mapping[torch.Tensor, str]
    ) -> None:
        self._group = group
        self._compressor = compressor
        self._names = names
        self._wait = GradientWait(group.meter, group.trace)

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        names = [self._names[parameter] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))  # views of the buffer
        self._wait.begin(buffer, bucket.is_last())

        def average() -> torch.Tensor:
            self._compressor.average(gradients, self._group)
            return buffer

        if not bucket.is_last() and not buffer.is_cuda:
            return _ending(self._wait, self._group.start(average).future)
        # After the last nothing is left to do meanwhile, and what goes wrong here is raised as it
        # is. A GPU's work goes on by itself, and must stay in the order of its stream.
        average()
        return _ending(self._wait, settled(buffer))


def settled(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """A future whose result is there already."""
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def _ending(wait: GradientWait, future: Future[torch.Tensor]) -> Future[torch.Tensor]:
    def arrived(done: Future[torch.Tensor]) -> torch.Tensor:
        wait.end()
        return done.value()

    return future.then(arrived)


class Guarded(Average):
    """An average that remembers on which rank a gradient was not finite."""

    def __init__(
        self,
        group: Group,
        guard: GradientGuard,
        names: Mapping[torch.Tensor, str],
        *,
        register: bool = True,
    ) -> None:
        super().__init__(group, register=register)
        self._guard = guard
        self._names = names

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        names = [self._names[parameter] for parameter in bucket.parameters()]
        self._guard.note(names, bucket.buffer(), last=bucket.is_last())
        return super().reduce(bucket)

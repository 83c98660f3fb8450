"""What becomes of a bucket of gradients during the backward pass: a `Reduction`.

`GradientReducer` calls it for each bucket as soon as its gradients are there, in the same order on
all ranks, and waits for the futures when the pass ends.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.futures import Future

from farandole.comm import Group
from farandole.comm.codecs import Compressor
from farandole.comm.meter import GradientWait
from farandole.sync.allreduce.buckets import Bucket


class Reduction(ABC):
    """What becomes of the gradients of a bucket. `close` is called when the model is gone."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Runs once per bucket, while the backward pass goes on; the future holds its buffer."""

    def close(self) -> None:
        return


def is_trained(model: nn.Module) -> bool:
    """Whether there is anything to average."""
    return any(parameter.requires_grad for parameter in model.parameters())


class Average(Reduction):
    """Over all ranks of a group, as they are."""

    def __init__(self, group: Group, algorithm: str = "auto", *, register: bool = True) -> None:
        self._group = group
        self._algorithm = algorithm
        self._register = register
        self._wait = GradientWait(group.meter, group.trace)
        self._registered = contextlib.ExitStack()
        self._known: dict[int, Bucket] = {}  # whose memory is registered

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        self._meet(bucket)
        buffer, last = bucket.buffer, bucket.is_last
        self._wait.begin(buffer, last)
        future = self._group.average_future(buffer, algorithm=self._algorithm, last=last)
        return _ending(self._wait, future)

    def close(self) -> None:
        self._registered.close()

    def _meet(self, bucket: Bucket) -> None:
        """Registers a bucket's memory with the group when it is first seen and here to stay."""
        known = self._known.get(bucket.index) is bucket
        if self._register and bucket.is_final and not known and not bucket.buffer.is_cuda:
            self._known[bucket.index] = bucket
            self._registered.enter_context(self._group.register(bucket.buffer))


class Compressed(Reduction):
    """The same with a codec: each gradient is compressed by itself, known by its name.

    Not each bucket: buckets are packed anew, and a resumed run must go on, to the bit, with what
    was left over of each gradient.
    """

    def __init__(self, group: Group, compressor: Compressor) -> None:
        self._group = group
        self._compressor = compressor
        self._wait = GradientWait(group.meter, group.trace)

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer
        gradients = dict(zip(bucket.names, bucket.gradients, strict=True))  # views of the buffer
        self._wait.begin(buffer, bucket.is_last)

        def average() -> torch.Tensor:
            # What nobody has is not sent: what was left over of it would be lost on the way.
            self._group.all_reduce(bucket.trailer, "average")
            present = zip(gradients.items(), bucket.has_gradient.tolist(), strict=True)
            self._compressor.average({n: g for (n, g), flag in present if flag > 0}, self._group)
            return buffer

        if not bucket.is_last and not buffer.is_cuda:
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

"""A `Reduction` does something with a bucket of gradients during the backward pass.

`GradientReducer` calls it for each bucket as soon as its gradients are there, in the same order on
all ranks, and waits for the futures when the pass ends.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.futures import Future

from farandole.comm import Group
from farandole.comm.gpu.device_average import DeviceAverage
from farandole.comm.meter import GradientWait
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.common.frozen import can_be_trained


class Pending(Protocol):
    """Something under way, such as a future."""

    def wait(self) -> object:
        """Returns when it has ended; on a GPU, what is queued from now on comes after it."""


class Reduction(ABC):
    """Averages the gradients of a bucket in some way. `close` is called when the model is gone."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Pending:
        """Begins with the bucket's buffer, once per bucket, while the backward pass goes on."""

    def finish(self, under_way: Sequence[Pending], spread: Callable[[], None]) -> None:
        """The pass has ended: waits for all that `reduce` has begun. Then `spread` gives all ranks
        rank 0's buffers."""
        for each in under_way:
            each.wait()
        spread()

    def close(self) -> None:
        return


def is_trained(model: nn.Module) -> bool:
    """Whether there is anything to average now."""
    return any(parameter.requires_grad for parameter in model.parameters())


def may_be_trained(model: nn.Module) -> bool:
    """Whether there is anything to average, now or when the script thaws what is frozen."""
    return any(map(can_be_trained, model.parameters()))


class Average(Reduction):
    """Averages over all ranks of a group, without compression."""

    def __init__(self, group: Group, algorithm: str = "auto", *, register: bool = True) -> None:
        self._group = group
        self._algorithm = algorithm
        self._register = register
        self._wait = GradientWait(group.meter, group.trace)
        self._registered = contextlib.ExitStack()
        self._known: dict[int, Bucket] = {}  # whose memory is registered

    def reduce(self, bucket: Bucket) -> Pending:
        self._meet(bucket)
        buffer, last = bucket.buffer, bucket.is_last
        self._wait.begin(buffer, last)
        begun = self._group.average_future(buffer, algorithm=self._algorithm, last=last)
        if isinstance(begun, DeviceAverage):
            return Then(begun, self._wait.end)
        return ending(self._wait, begun)

    def restart(self) -> None:
        """Forgets what was begun over connections that are broken."""
        self._wait = GradientWait(self._group.meter, self._group.trace)
        self.close()

    def close(self) -> None:
        self._registered.close()
        self._known.clear()

    def _meet(self, bucket: Bucket) -> None:
        """Registers a bucket's memory with the group when it is first seen and here to stay."""
        known = self._known.get(bucket.index) is bucket
        if self._register and bucket.is_final and not known and not bucket.buffer.is_cuda:
            self._known[bucket.index] = bucket
            self._registered.enter_context(self._group.register(bucket.buffer))


class Then:
    """Something under way, and what is done once, by whoever waits for it first.

    On a GPU a future does the same with a stream of its own, and takes ten times as long.
    """

    def __init__(self, first: Pending, more: Callable[[], None]) -> None:
        self._first = first
        self._more: Callable[[], None] | None = more

    def wait(self) -> None:
        self._first.wait()
        more, self._more = self._more, None
        if more is not None:
            more()


def settled(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """A future that is complete from the start."""
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def ending(wait: GradientWait, future: Future[torch.Tensor]) -> Future[torch.Tensor]:
    """`future`, with which the wait for gradients ends."""

    def arrived(done: Future[torch.Tensor]) -> torch.Tensor:
        wait.end()
        return done.value()

    return future.then(arrived)

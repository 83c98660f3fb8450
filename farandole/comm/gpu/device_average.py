"""An average of a tensor on a GPU, which the backend computes on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist


class DeviceAverage:
    """One that is under way. `fail` raises what is to be raised instead of a RuntimeError."""

    def __init__(self, work: dist.Work, fail: Callable[[RuntimeError], NoReturn]) -> None:
        self._work = work
        self._fail = fail
        self._seen: _Seen | None = None

    def done(self) -> bool:
        """Whether the GPU has come so far. For the thread that has begun it."""
        return self._work.is_completed()

    def seen_from_outside(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """The same, for any thread, and without holding on to anything but a byte. It is seen when
        the GPU has passed the place where `wait` was called for `tensor`."""
        self._seen = _Seen(tensor.device)
        return self._seen.is_over

    def wait(self) -> None:
        """What is queued from now on comes after it. The host goes on, if the backend lets it."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if self._seen is not None:
                self._seen.give_up()
            self._fail(error)
        if self._seen is not None:
            self._seen.mark()


class _Seen:
    """A byte of the host's memory that a GPU writes when it comes to a place.

    Not a question to CUDA: from another thread that would spoil a graph that is being captured,
    open a context on the first GPU, and wait for locks that another thread holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._byte = torch.zeros(1, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._shown: np.ndarray = self._byte.numpy()

    @property
    def is_over(self) -> Callable[[], bool]:
        shown = self._shown
        return lambda: bool(shown[0])

    def mark(self) -> None:
        """When what is queued on the current stream so far is over."""
        one = torch.ones(1, dtype=torch.uint8, device=self._device)
        self._byte.copy_(one, non_blocking=True)

    def give_up(self) -> None:
        self._shown[0] = 1

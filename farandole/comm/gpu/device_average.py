"""An average of a tensor on a GPU, which the backend computes on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from farandole.system.activity import NO_ACTIVITY, Activity


class DeviceAverage:
    """One that is under way on `device`. `fail` raises what is to be raised instead of a
    RuntimeError. `activity` hears when this rank needs the others: from `wait` on."""

    def __init__(
        self,
        work: dist.Work,
        device: torch.device,
        fail: Callable[[RuntimeError], NoReturn],
        activity: Activity = NO_ACTIVITY,
    ) -> None:
        self._work = work
        self._device = device
        self._fail = fail
        self._activity = activity

    def done(self) -> bool:
        """Whether the GPU has come so far. For the thread that has begun it."""
        return self._work.is_completed()

    def wait(self) -> None:
        """What is queued from now on comes after it. The host goes on, if the backend lets it."""
        self._activity.begin_wait()
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(error)
        finally:
            self._activity.end_wait()
        if self._activity is not NO_ACTIVITY:
            self._activity.needs_others(passes_here(self._device))


def passes_here(device: torch.device) -> Callable[[], bool]:
    """Answers, in any thread, whether what is queued on the current stream so far is over: the GPU
    writes a byte of the host's memory then.

    Not a question to CUDA: from another thread that would spoil a graph that is being captured,
    open a context on the first GPU, and wait for locks that another thread holds.
    """
    byte = torch.zeros(1, dtype=torch.uint8, pin_memory=device.type == "cuda")
    shown: np.ndarray = byte.numpy()
    byte.copy_(torch.ones(1, dtype=torch.uint8, device=device), non_blocking=True)
    return lambda: bool(shown[0])

"""An average of a tensor on a GPU, which the backend computes on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist


class DeviceAverage:
    """One that is under way. `fail` raises what is to be raised instead of a RuntimeError."""

    def __init__(self, work: dist.Work, fail: Callable[[RuntimeError], NoReturn]) -> None:
        self._work = work
        self._fail = fail

    def done(self) -> bool:
        """Whether the GPU has come so far. From any thread."""
        return self._work.is_completed()

    def wait(self) -> None:
        """What is queued from now on comes after it. The host goes on, if the backend lets it."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(error)

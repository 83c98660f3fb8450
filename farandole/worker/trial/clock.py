"""Measures throughput in a trial of `farandole run --per-gpu auto`: rank 0's clock.

    step  0 … 9     10 …                                    enough
          warm-up   │ counted: samples, and time in passes  │ the launcher stops the trial
                    └ the GPU has done all that was before  └ and here all of this

The clock runs within passes over training data, and stands still between them: evaluation and
checkpoints happen more or less often when an epoch has fewer steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from farandole.environment import GPU_TRIAL
from farandole.worker.trial.record import WARM_UP_STEPS, ThroughputRecord, write_trial

_STEPS = 20  # at least so many are measured,
_LEAST_SECONDS = 2.0  # for so long at least,
_MOST_SECONDS = 30.0  # unless they take longer than this


class TrialClock:
    """Told of every batch and of the end of every pass, on rank 0."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._warm_up_steps = 0
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0
        self._since: float | None = None  # the clock runs; its time before that is in `_seconds`
        self._is_over = False

    def batch(self, samples: int) -> None:
        """A step begins, and the one before it is queued."""
        if self._is_over:
            return
        if self._warm_up_steps < WARM_UP_STEPS:
            self._warm_up_steps += 1
            return
        if self._since is None:
            self._begin()
        elif self._is_due():
            self._pause()
            if self._is_enough():
                self._is_over = True
                self._write(is_enough=True)
                return
            self._begin()
        self._steps += 1
        self._samples += samples

    def end_pass(self) -> None:
        if self._since is not None and not self._is_over:
            self._pause()

    def close(self) -> None:
        """The script is over: what there is so far must do."""
        self.end_pass()
        if not self._is_over:
            self._is_over = True
            self._write(is_enough=False)  # it ends by itself

    def _begin(self) -> None:
        self._wait_for_device()
        self._since = time.perf_counter()
        if not self._steps:
            self._write(is_enough=False)

    def _pause(self) -> None:
        assert self._since is not None
        self._wait_for_device()
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def _is_due(self) -> bool:
        """By the host's time. Only then is the GPU waited for, which would slow it down else."""
        assert self._since is not None
        return self._suffices(self._seconds + time.perf_counter() - self._since)

    def _is_enough(self) -> bool:
        return self._suffices(self._seconds)

    def _suffices(self, seconds: float) -> bool:
        return seconds >= (_LEAST_SECONDS if self._steps >= _STEPS else _MOST_SECONDS)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, *, is_enough: bool) -> None:
        write_trial(
            self._path,
            ThroughputRecord(
                self._warm_up_steps, self._steps, self._samples, self._seconds, is_enough
            ),
        )


def is_trial(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this run is there to be measured, and then thrown away."""
    return bool(environ.get(GPU_TRIAL))


def trial_clock(
    rank: int, device: torch.device, environ: Mapping[str, str] = os.environ
) -> TrialClock | None:
    """On rank 0 of a trial."""
    return TrialClock(Path(environ[GPU_TRIAL]), device) if is_trial(environ) and rank == 0 else None

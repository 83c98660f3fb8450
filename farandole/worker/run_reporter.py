"""A run's side of its report to the launcher: see `run_report`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from farandole.environment import ATTEMPT
from farandole.worker.rendezvous import connect_store
from farandole.worker.run_report import KEY, RunReport
from farandole.worker.store.address import launcher_store

_APART_SECONDS = 1.0  # between two records of progress alone
_PATIENCE = timedelta(seconds=10)


class RunReporter:
    """In rank 0. May be called in several threads. A store that is gone is no error of the run."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._report = RunReport(name)
        self._lock = threading.Lock()
        self._looked_in: set[str] = set()
        self._written = 0.0
        self._update()

    def progress(self, steps: int, epoch: int) -> None:
        """In each step; it is written now and then."""
        if time.monotonic() - self._written >= _APART_SECONDS:
            self._update(steps=steps, epoch=epoch)

    def looked(self, place: str) -> None:
        """The run has looked for checkpoints there. The empty `place` is the run's own."""
        self._looked_in.add(place)

    def has_checkpoint(self, place: str, checkpoint: str, steps: int, epoch: int) -> None:
        """The run has saved it there, or goes on from it."""
        self._update(
            steps=max(steps, self._report.steps),
            checkpoint=checkpoint,
            checkpoint_steps=steps,
            checkpoint_epoch=epoch,
            resumes=place in self._looked_in,
        )

    def leaves_state(self) -> None:
        """Ranks will write what they hold when another one is lost, and need time for it."""
        self._update(leaves_state=True)

    def _update(self, **changes: Any) -> None:
        with self._lock, contextlib.suppress(RuntimeError, OSError, dist.DistError):
            self._report = replace(self._report, **changes)
            self._written = time.monotonic()
            self._store.set(KEY, json.dumps(asdict(self._report)))


def run_reporter(name: str, environ: Mapping[str, str] = os.environ) -> RunReporter | None:
    """None where the launcher does not start a job again. Raises `JoinError`."""
    address = launcher_store(environ)
    if address is None or not environ.get(ATTEMPT):
        return None
    return RunReporter(connect_store(address, _PATIENCE), name)

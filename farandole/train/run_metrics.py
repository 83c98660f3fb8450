"""A run's metrics: what scripts log and what strategies decide, written on rank 0."""

from __future__ import annotations

import os
import platform
import time
import warnings

import torch

import farandole
from farandole.environment import STARTED
from farandole.report.metrics import MetricsLog
from farandole.train.distributed_models import Note
from farandole.train.numbers import plain, short
from farandole.train.session import Session
from farandole.train.settings import unwritable


class RunMetrics:
    """Opens its file with the first line, so that a run that logs nothing leaves no folder."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log: MetricsLog | None = None
        started = os.environ.get(STARTED)
        self._startup_seconds = time.monotonic() - float(started) if started else None
        self.notes: list[tuple[dict[str, float], Note]] = []
        """What strategies have decided, with the counters of that moment, and is not written."""

    @property
    def has_begun(self) -> bool:
        return self._log is not None

    def collect_notes(self) -> None:
        """Takes what strategies have decided; it is written with the next log."""
        notes = list(self._session.models.take_notes())
        if notes and self._session.rank == 0:
            counters = self._session.counters()
            self.notes += [(counters, note) for note in notes]

    def log(self, **metrics: float | torch.Tensor | str) -> None:
        """Rank 0 writes and prints; the others' calls do nothing."""
        session = self._session
        session.group.meter.activity.step()
        if session.rank != 0:
            return
        logged = {name: plain(name, value) for name, value in metrics.items()}
        if isinstance(logged.get("loss"), (int, float)):
            session.models.hear(float(logged["loss"]))
        counters = session.counters()
        try:
            log = self._open()
            self._write_notes(log)
            log.log(counters, logged)
        except OSError as error:
            raise unwritable(session.folder, error) from error
        shown = "  ".join(f"{name} {short(value)}" for name, value in logged.items())
        waited = counters["waited_seconds"] / max(counters["time"], 1e-9)
        session.print(f"{shown}  ·  {counters['time']:.1f} s, {waited:.0%} waiting")

    def close(self) -> None:
        if self._log is None:
            return
        try:
            self._write_notes(self._log)
            self._log.close(self._session.counters())
        except OSError as error:  # must not hide the error that ended the script
            folder = self._session.folder
            warnings.warn(f"the end of {folder} is not written: {error}", stacklevel=3)

    def _write_notes(self, log: MetricsLog) -> None:
        self.collect_notes()
        for counters, note in self.notes:
            log.note(counters, note)
        self.notes.clear()

    def _open(self) -> MetricsLog:
        if self._log is None:
            session = self._session
            start = {
                "name": session.folder.name,
                "sync": str(session.strategy),
                **({} if session.layout is None else {"layout": str(session.layout)}),
                "size": session.size,
                "hosts": len(session.topology.hosts),
                "device": str(session.device),
                "script": session.settings.script,
                "startup_seconds": self._startup_seconds,
                "seed": session.seed,
                "versions": versions(),
            }
            goes_on = session.progress.resumed or session.is_successor
            self._log = MetricsLog(session.folder, start, resumed=goes_on)
        return self._log


def versions() -> dict[str, str]:
    return {
        "farandole": farandole.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

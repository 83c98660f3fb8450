"""Runs the drills of a table side by side, and keeps each verdict in a file of its own.

A verdict's file is written whole or not at all, so that a table that was interrupted can go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing as mp
import queue
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.system.orphans import end_with_parent
from faults.run import Verdict, run_drill
from faults.slot import Slot
from faults.table import Drill, drills
from faults.weights import Baselines

Record = dict[str, Any]
_END_SECONDS = 30.0
_LONGEST_SECONDS = 600.0  # of one drill, whatever happens


def serve(tasks: Any, verdicts: Any, undisturbed: Path) -> None:
    """In a process of its own: one drill after another, until it is told to stop."""
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by way of every `finally`
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    slot = Slot()
    try:
        for drill in iter(tasks.get, None):
            verdicts.put((drill, run_drill(drill, slot, Baselines(undisturbed))))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the folders go first
        slot.close()


class Book:
    """The verdicts of one table, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._undisturbed = self._folder / "undisturbed"
        self._undisturbed.mkdir(parents=True, exist_ok=True)

    def run(
        self, chosen: Sequence[Drill], jobs: int, failed_again: bool = False
    ) -> Iterator[tuple[Drill, Record]]:
        """Yields each of `chosen` when it has a verdict; those that had one first."""
        due = []
        for drill in chosen:
            known = self.read(drill)
            if known is None or (failed_again and known["broken"]):
                due.append(drill)
            else:
                yield drill, known
        for drill in self._run(due, jobs):
            record = self.read(drill)
            assert record is not None
            if drill in due:
                yield drill, record

    def read(self, drill: Drill) -> Record | None:
        path = self._path(drill)
        if not path.exists():
            return None
        record: Record = json.loads(path.read_text())
        return record

    def _run(self, due: Sequence[Drill], jobs: int) -> Iterator[Drill]:
        """Others are compared with what undisturbed jobs leave: those come first."""
        settings = {drill.setting for drill in due}
        known = Baselines(self._undisturbed)
        first = [
            row
            for row in drills()
            if row.action == "nothing"
            and (row in due or (row.setting in settings and not known.has(row.setting)))
        ]
        rest = [drill for drill in due if drill not in first]
        if not due:
            return
        context = mp.get_context("spawn")
        tasks, verdicts = context.Queue(), context.Queue()
        slots = [
            context.Process(target=serve, args=(tasks, verdicts, self._undisturbed), daemon=True)
            for _ in range(min(jobs, len(first) + len(rest)))
        ]
        for slot in slots:
            slot.start()
        try:
            for part in (first, rest):
                for drill in part:
                    tasks.put(drill)
                for _ in part:
                    drill, verdict = self._next(verdicts)
                    self._write(drill, verdict)
                    yield drill
        finally:
            _end(slots, tasks)

    @staticmethod
    def _next(verdicts: Any) -> tuple[Drill, Verdict]:
        try:
            found: tuple[Drill, Verdict] = verdicts.get(timeout=_LONGEST_SECONDS)
        except queue.Empty:
            raise SystemExit(f"no drill has ended for {_LONGEST_SECONDS:g} s") from None
        return found

    def _write(self, drill: Drill, verdict: Verdict) -> None:
        path = self._path(drill)
        half = path.with_suffix(".half")
        half.write_text(json.dumps(dataclasses.asdict(verdict), indent=1))
        half.rename(path)

    def _path(self, drill: Drill) -> Path:
        return self._folder / f"{hashlib.sha256(drill.name.encode()).hexdigest()[:16]}.json"


def _end(slots: Sequence[Any], tasks: Any) -> None:
    """Ends all slots: one that runs a drill by a signal, one that waits for a drill by None.

    Both, because a signal that comes just before a wait does not end the wait.
    """
    with contextlib.suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for slot in slots:
        tasks.put(None)
        slot.terminate()
    for slot in slots:
        slot.join(_END_SECONDS)
        if slot.is_alive():
            slot.kill()

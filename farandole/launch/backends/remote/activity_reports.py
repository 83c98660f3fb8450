"""Tells the launcher how far the workers of another host have come, for `--stall`.

The agent looks where a launcher would look on its own host. The stacks that workers print become
part of what they write to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.environment import ACTIVITY
from farandole.launch.backends.remote import frames
from farandole.launch.backends.remote.frames import encoded
from farandole.launch.backends.remote.json_record import JsonRecord
from farandole.launch.backends.remote.supervised import Supervised
from farandole.launch.watches.progress import Progress, progress_of
from farandole.system.activity import Seen, stack_file

_LOOK_SECONDS = 0.5
_FRESH_SECONDS = 5.0  # after which a report says nothing about now


@dataclass(frozen=True)
class ActivityReport(JsonRecord):
    """Of one worker. Clocks of two hosts differ, so its last step was so many seconds ago."""

    steps: int
    stepped_seconds_ago: float
    waits: bool
    is_stopped: bool
    can_print: bool
    printed_bytes: int

    def progress(self, received: float) -> Progress:
        """`received` is when it came, by this host's `time.monotonic`.

        Where no more reports come, nobody can say that the worker makes no step.
        """
        now = time.monotonic()
        is_fresh = now - received < _FRESH_SECONDS
        stepped = received - self.stepped_seconds_ago if is_fresh else now
        seen = Seen(self.steps, stepped, self.waits, self.can_print)
        return Progress(seen, self.is_stopped, self.can_print, self.printed_bytes)


class ActivityReports:
    """Files in `folder`, one for each worker. None: nobody watches."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._looked = time.monotonic()
        self._shown: dict[int, int] = {}  # bytes of a worker's stacks that were sent

    def expect(self, number: int) -> dict[str, str]:
        """Call it before a worker starts: the variables that it needs."""
        if self._folder is None:
            return {}
        path = self._path(number)
        for file in (path, stack_file(path)):
            file.unlink(missing_ok=True)  # an earlier life's
        self._shown[number] = 0
        return {ACTIVITY: str(path)}

    def frames(self, workers: Mapping[int, Supervised]) -> Iterator[bytes]:
        """What there is to tell. Call it often."""
        now = time.monotonic()
        if self._folder is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for number, worker in workers.items():
            path = self._path(number)
            found = progress_of(worker.pid, path)
            if found.seen is None:
                continue
            if stacks := self.new_stacks(number):
                yield encoded(frames.ERRORS, number, stacks)
            report = ActivityReport(
                found.seen.steps,
                now - found.seen.stepped,
                found.seen.waits,
                found.is_stopped,
                found.can_print,
                self._shown[number],
            )
            yield encoded(frames.ACTIVITY, number, report.to_json())

    def new_stacks(self, number: int) -> bytes:
        """What a worker has printed since the last call."""
        if self._folder is None:
            return b""
        try:
            with stack_file(self._path(number)).open("rb") as stacks:
                stacks.seek(self._shown[number])
                found = stacks.read()
        except OSError:
            return b""
        self._shown[number] += len(found)
        return found

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"worker-{number}.activity"

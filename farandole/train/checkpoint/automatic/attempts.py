"""How often a run fails: its attempts, one for each start, in a small file in its folder.

    runs/digits/attempts.json    {"attempts": [{"seconds": 5400.0, "failed": true}, …]}

An attempt counts as failed from its start until it says that it has ended in order: a process that
is killed cannot say anything. Where the user has stopped the job (Ctrl-C), the launcher says so
instead, by a file beside this one. Its seconds are written with each checkpoint, and so are right
up to the last one. The file is for a choice of speed only, so one that cannot be read or written is
no error.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from farandole.errors import FarandoleError
from farandole.files import write_whole
from farandole.train.checkpoint.automatic.durations import show_seconds
from farandole.worker.marker_files import INTERRUPTED, record_attempts

NAME: Final = "attempts.json"
ASSUMED_SECONDS: Final = 24 * 3600.0
"""Without a record, one failure in so much time is assumed; with one, it is still given the weight
of one failure, so that a first failure after a minute does not stand for the whole run."""

_LARGEST_BYTES: Final = 1 << 20
_MOST: Final = 500  # attempts that are remembered


@dataclass(frozen=True)
class Attempt:
    seconds: float
    failed: bool


class Attempts:
    """Those of one run, on rank 0. The last one is this process's own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._earlier = _read(self._path)
        if self._earlier and _was_interrupted(folder):
            self._earlier[-1] = replace(self._earlier[-1], failed=False)
        record_attempts(folder)
        self._own = Attempt(0.0, failed=True)
        self._began = time.monotonic()
        self._raised = False
        self._show = sys.excepthook
        self._hook = self._note_uncaught  # one object: methods are made anew whenever asked for
        sys.excepthook = self._hook

    def progress(self) -> None:
        """It is still alive."""
        self._own = replace(self._own, seconds=time.monotonic() - self._began)
        self._write()

    def end(self) -> None:
        """It ends by itself; a failure if an exception ends the script."""
        self._own = replace(self._own, failed=self._raised)
        self.progress()
        if sys.excepthook is self._hook:  # else somebody else's is around it
            sys.excepthook = self._show

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures, from this and all earlier attempts."""
        failures = sum(attempt.failed for attempt in self._earlier)
        return (ASSUMED_SECONDS + self._lived) / (1 + failures)

    @property
    def evidence(self) -> str:
        """Where that number comes from."""
        failures = sum(attempt.failed for attempt in self._earlier)
        if not failures:
            return f"no failure is recorded, one in {show_seconds(ASSUMED_SECONDS)} is assumed"
        said = f"{failures} failure{'s' if failures > 1 else ''} in {show_seconds(self._lived)}"
        return f"{self._path} records {said}"

    @property
    def _lived(self) -> float:
        own = time.monotonic() - self._began
        return own + sum(attempt.seconds for attempt in self._earlier)

    def _note_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Ctrl-C is somebody's wish, and says nothing about the machine.
        self._raised = self._raised or not issubclass(kind, KeyboardInterrupt)
        self._show(kind, error, trace)

    def _write(self) -> None:
        attempts = [*self._earlier, self._own][-_MOST:]
        text = json.dumps({"attempts": [asdict(attempt) for attempt in attempts]})
        with contextlib.suppress(FarandoleError, OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, text.encode())


def _was_interrupted(folder: Path) -> bool:
    """Whether the user stopped the last attempt. Says so once."""
    try:
        (folder / INTERRUPTED).unlink()
    except OSError:
        return False
    return True


def _read(path: Path) -> list[Attempt]:
    """None where there is no such file, or something else under its name."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST_BYTES))
        return [_attempt(item) for item in content["attempts"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return []


def _attempt(item: Any) -> Attempt:
    seconds = float(item["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError("no time")
    return Attempt(seconds, failed=item["failed"] is True)

"""Which worker failed first, and why.

When one rank raises, its peers soon fail too, because their collectives break. What the user needs
is the first traceback, not the last. Each worker therefore writes its exception with a time stamp
before it dies, or when it left if there was none; the launcher picks the cause among what it finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_TAIL_LINES = 40
# A worker that was killed could not say when, only the launcher when it noticed: later than the
# peers felt it, on a busy machine by seconds. But those that ignore SIGTERM for 30 s are killed by
# the launcher itself, and must not look like the cause.
_NOTICED_WITHIN_SECONDS = 20


@dataclass(frozen=True)
class Failure:
    """One worker's end."""

    rank: int
    exit_code: int  # negative: the signal that killed it, as in subprocess
    error: str  # its traceback, or the end of its standard error
    time_ns: int  # when it raised or left; if it could not say, not later than that

    @property
    def killed_by(self) -> str | None:
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # real-time signals have numbers only
            return f"signal {-self.exit_code}"

    def __str__(self) -> str:
        """In one line: which rank, how, and the last thing it said."""
        if self.killed_by:
            return f"rank {self.rank} was killed by {self.killed_by}"
        said = self.error.strip().splitlines()
        return f"rank {self.rank} failed: {said[-1] if said else f'exit code {self.exit_code}'}"


def record_uncaught(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker: from now on an uncaught exception is also written for the launcher to find."""
    target = environ.get(_FILE_VARIABLE)
    if not target:
        return
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _write(Path(target), "".join(traceback.format_exception(kind, error, trace)))
        show(kind, error, trace)

    sys.excepthook = hook


def record_leaving(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker, before its peers can notice its end: says when that was, if it did not raise.

    So `sys.exit(3)` on one rank is told apart from the broken collectives that follow from it. The
    launcher stops everyone when the first of those ends, which may be before this process has; it
    is leaving anyway, so that SIGTERM must not replace its exit code.
    """
    target = environ.get(_FILE_VARIABLE)
    if target and "FARANDOLE_JOB" in environ:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not Path(target).exists():
            _write(Path(target), "")


def _write(target: Path, text: str) -> None:
    now = time.time_ns()
    # The shape around `time_ns` is the one TorchElastic's own reader expects.
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)}}
    with contextlib.suppress(OSError):  # an exception still goes to standard error
        # In one step: the launcher may end this process at any moment, and that reader does not
        # survive half a file.
        half = target.with_suffix(".half")
        half.write_text(json.dumps({"message": message, "time_ns": now}))
        half.replace(target)


def read_failure(
    rank: int,
    exit_code: int,
    noticed_seconds: int,
    error_file: Path,
    stderr_file: Path,
) -> Failure:
    """In the launcher: what a worker left behind. Never raises: a missing file is no news."""
    error = ""
    time_ns = (noticed_seconds - _NOTICED_WITHIN_SECONDS) * 10**9
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(error_file.read_text())
        error, time_ns = found["message"]["message"], int(found["time_ns"])
    if error:
        # It raised, and was on its way out with 1 when the launcher sent a signal to hurry it.
        exit_code = exit_code if exit_code > 0 else 1
    else:
        with contextlib.suppress(OSError):
            lines = stderr_file.read_text(errors="replace").splitlines()
            error = "\n".join(lines[-_TAIL_LINES:])
    return Failure(rank, exit_code, error, time_ns)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest.

    SIGTERM is what the launcher ends the rest with, so it counts only when there is nothing else.
    Of failures at the same time the one given first is taken.
    """
    return min(failures, key=lambda failure: (failure.killed_by == "SIGTERM", failure.time_ns))

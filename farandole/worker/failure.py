"""Which worker failed first, and why.

When one rank raises, its peers soon fail too, because their collectives break. What the user needs
is the first traceback, not the last. Each worker therefore writes its exception with a time stamp
before it dies, or when it left if there was none, and whether the exception says that a peer was
lost. The launcher adds what it knows itself, whom it has told to stop and when, and picks the cause
by the `Kind` of each end, never by the text of a message.
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
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from farandole.environment import JOB
from farandole.errors import CommError, JoinError, NotElasticError, UserError
from farandole.worker.out_of_memory import explain_out_of_memory, is_out_of_memory
from farandole.worker.signals import exit_code_of

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_TAIL_LINES = 40
_USAGE_CODE = 2  # of argparse, click and shells
_SAVING_SIGNALS = ("SIGTERM", "SIGUSR1")  # on which a worker saves, and leaves by itself
# A worker that was killed could not say when, only the launcher when it noticed: later than the
# peers felt it, on a busy machine by seconds.
_NOTICED_WITHIN_SECONDS = 20


class Kind(IntEnum):
    """Why a worker ended badly. The cause of a job's end is of the lowest kind there is."""

    OWN = 0  # by itself: it raised, exited, or a signal that the launcher did not send killed it
    HELD_UP = 1  # the launcher ended it, because the others waited for it in vain
    FOLLOWED = 2  # it raised because a peer was lost or did not answer
    STOPPED = 3  # the launcher told it to stop, because of another


@dataclass(frozen=True)
class Failure:
    """One worker's end."""

    rank: int
    exit_code: int  # negative: the signal that killed it, as in subprocess
    error: str  # its traceback, or the end of its standard error; if it held others up, how
    time_ns: int  # when it raised or left; if it could not say, not later than that
    kind: Kind = Kind.OWN
    is_dated: bool = False  # it has said itself when that was
    is_user_error: bool = False  # it raised `UserError`
    is_not_elastic: bool = False  # it raised `NotElasticError`
    is_out_of_memory: bool = False  # of a GPU
    advice: str = ""  # what the worker itself knows about that, beside its traceback

    @property
    def killed_by(self) -> str | None:
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # real-time signals have numbers only
            return f"signal {-self.exit_code}"

    @property
    def how(self) -> str:
        """In one line: how it ended, and the last thing it said."""
        if self.kind is Kind.HELD_UP:
            return f"{self.error}, and was ended"
        if self.killed_by:
            return f"was killed by {self.killed_by}"
        said = self.error.strip().splitlines()
        return f"failed: {said[-1] if said else f'exit code {self.exit_code}'}"

    @property
    def is_wrong_use(self) -> bool:
        """The script was called wrongly, or asked for what cannot be: it would fail again."""
        return self.kind is Kind.OWN and (self.is_user_error or self.exit_code == _USAGE_CODE)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"

    def told_to_stop(self, when_ns: int) -> Failure:
        """The launcher told this worker to stop at that time. One that was leaving before it, and
        said so, has ended by itself all the same."""
        was_leaving = self.is_dated and self.time_ns < when_ns
        return self if was_leaving else replace(self, kind=max(self.kind, Kind.STOPPED))

    def held_up_others(self, how: str) -> Failure:
        """The launcher ended this worker, because others waited for it in vain."""
        code = self.exit_code or -signal.SIGTERM  # it may have ended in peace when told to
        return replace(self, exit_code=code, error=how, kind=Kind.HELD_UP)


def record_uncaught(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker: from now on an uncaught exception is also written for the launcher to find."""
    target = environ.get(_FILE_VARIABLE)
    if not target:
        return
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        # Python leaves by the signal itself then, as a shell expects of whatever Ctrl-C has ended.
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _write(Path(target), text, error, leaving_with=code, environ=environ)
        show(kind, error, trace)

    sys.excepthook = hook


def record_leaving(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker, before its peers can notice its end: says when that was, if it did not raise.

    So `sys.exit(3)` on one rank is told apart from the broken collectives that follow from it. The
    launcher stops everyone when the first of those ends, which may be before this process has; it
    is leaving anyway, so that SIGTERM must not replace its exit code.
    """
    target = environ.get(_FILE_VARIABLE)
    if target and JOB in environ:
        if threading.current_thread() is threading.main_thread():
            # Python allows signal handlers to be set in the main thread only.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not Path(target).exists():
            _write(Path(target), "")


def _follows(error: BaseException | None) -> bool:
    """Whether a lost peer led to this error, directly or while the script dealt with that."""
    seen: set[int] = set()  # a chain may be closed by hand
    while error is not None and id(error) not in seen:
        if isinstance(error, (CommError, JoinError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _write(
    target: Path,
    text: str,
    error: BaseException | None = None,
    *,
    leaving_with: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> None:
    now = time.time_ns()
    out_of_memory = is_out_of_memory(error)
    # The shape around `time_ns` is the one TorchElastic's own reader expects.
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)}}
    with contextlib.suppress(OSError):  # an exception still goes to standard error
        # In one step: the launcher may end this process at any moment, and that reader does not
        # survive half a file.
        half = target.with_suffix(".half")
        said = {
            "message": message,
            "time_ns": now,
            "followed": _follows(error),
            "leaving_with": leaving_with,
            "user_error": isinstance(error, UserError),
            "not_elastic": isinstance(error, NotElasticError),
            "out_of_memory": out_of_memory,
            "advice": explain_out_of_memory(environ) if out_of_memory else "",
        }
        half.write_text(json.dumps(said))
        half.replace(target)


def read_failure(
    rank: int,
    exit_code: int,
    noticed_seconds: int,
    error_file: Path,
    stderr_file: Path,
) -> Failure:
    """In the launcher: what a worker left behind. Never raises: a missing file is no news."""
    error = advice = ""
    time_ns = (noticed_seconds - _NOTICED_WITHIN_SECONDS) * 10**9
    kind, is_dated = Kind.OWN, False
    is_user_error = is_not_elastic = out_of_memory = False
    leaving_with = 1
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(error_file.read_text())
        error, time_ns = found["message"]["message"], int(found["time_ns"])
        kind, is_dated = Kind.FOLLOWED if found.get("followed") else Kind.OWN, True
        leaving_with = int(found.get("leaving_with", leaving_with))  # others write no such thing
        is_user_error = found.get("user_error") is True
        is_not_elastic = found.get("not_elastic") is True
        out_of_memory = found.get("out_of_memory") is True
        advice = str(found.get("advice", ""))
    if error:
        # It raised, and was on its way out when the launcher sent a signal to hurry it.
        # The exit code that the worker was about to return counts, not the signal that came in
        # between.
        exit_code = exit_code if exit_code > 0 else leaving_with
    else:
        with contextlib.suppress(OSError):
            lines = stderr_file.read_text(errors="replace").splitlines()
            error = "\n".join(lines[-_TAIL_LINES:])
    return Failure(
        *(rank, exit_code, error, time_ns, kind, is_dated),
        is_user_error=is_user_error,
        is_not_elastic=is_not_elastic,
        is_out_of_memory=out_of_memory,
        advice=advice,
    )


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: of the lowest kind, and of those the earliest.

    Of failures at the same time one by a signal is taken, or else the one given first.
    """
    return min(
        failures, key=lambda failure: (failure.kind, failure.time_ns, failure.exit_code >= 0)
    )


def signal_obeyed_by(failures: Sequence[Failure]) -> str | None:
    """The signal on which all of these have saved and left by themselves: that is no failure.

    None: it was something else. Those that a signal has killed have a negative exit code.
    """
    codes = {failure.exit_code for failure in failures}
    return next((name for name in _SAVING_SIGNALS if codes == {exit_code_of(name)}), None)

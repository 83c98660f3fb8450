"""What a worker lets its launcher see: how many steps it has made, and whether it waits for others.

A few numbers in a file that the worker maps into memory, so that telling takes no system call. A
launcher that looks for workers without progress (`--stall`) names the file in a variable.

    0        8        16        24        32        40
    ┌────────┬────────┬─────────┬─────────┬─────────┐
    │ format │ steps  │ time of │ waits   │ prints  │    time: CLOCK_MONOTONIC, the same for all
    │        │        │ the last│ now     │ stacks  │    processes of a host
    └────────┴────────┴─────────┴─────────┴─────────┘
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.environment import ACTIVITY

STACK_SIGNAL = signal.SIGUSR2
"""On which a worker writes its stack, unless the script has a use for that signal itself."""

_LOOK_SECONDS = 0.25
_FORMAT = b"activity"
_ALL = struct.Struct("=8sQdQQ")
_STEPS = struct.Struct("=Qd")
_NUMBER = struct.Struct("=Q")
_STEPS_AT, _WAITS_AT, _STACKS_AT = 8, 24, 32


class Activity:
    """Told of what happens; this one keeps it to itself."""

    def step(self) -> None:
        """The worker has got somewhere: a batch, an optimizer's step, a line of the log."""

    def begin_wait(self) -> None:
        """From now on it waits for other ranks, or for servers."""

    def end_wait(self) -> None:
        """Not any more."""

    def needs_others(self, is_over: Callable[[], bool]) -> None:
        """A GPU waits for other ranks in the background until `is_over`, and so does whoever waits
        for that GPU, without a word to us. What was told before is over when this is. It is asked
        again and again, by another thread."""


NO_ACTIVITY = Activity()


class SharedActivity(Activity):
    """Shows it to the launcher. Raises `OSError` where the file cannot be made."""

    def __init__(self, path: Path, *, prints_stacks: bool) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, _ALL.size)
            self._memory = mmap.mmap(descriptor, _ALL.size)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._steps = 0
        self._waits = 0
        self._is_over: Callable[[], bool] = lambda: True
        self._looker: threading.Thread | None = None
        _ALL.pack_into(self._memory, 0, _FORMAT, 0, time.monotonic(), 0, prints_stacks)

    def step(self) -> None:
        self._steps += 1
        # No lock with the launcher: it may see the count without the time. It looks again after a
        # moment, and a step that it sees late only makes it wait longer.
        _STEPS.pack_into(self._memory, _STEPS_AT, self._steps, time.monotonic())

    def begin_wait(self) -> None:
        self._count_waits(1)

    def end_wait(self) -> None:
        self._count_waits(-1)

    def needs_others(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        if self._looker is None:
            self._looker = threading.Thread(target=self._look, name="activity", daemon=True)
            self._looker.start()

    def _look(self) -> None:
        waits = False
        while True:
            waited = waits
            waits = not self._is_over()
            self._count_waits(int(waits) - int(waited))
            time.sleep(_LOOK_SECONDS)

    def _count_waits(self, more: int) -> None:
        with self._lock:  # several threads may wait at once
            self._waits += more
            _NUMBER.pack_into(self._memory, _WAITS_AT, self._waits)


@dataclass(frozen=True)
class Seen:
    """What a launcher finds in the file."""

    steps: int
    stepped: float  # when, by `time.monotonic`
    waits: bool  # for other ranks, or for servers
    prints_stacks: bool


def read_activity(path: Path) -> Seen | None:
    """None: the worker has not called `fd.init` so far."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _ALL.size or not content.startswith(_FORMAT):
        return None
    _, steps, stepped, waits, prints_stacks = _ALL.unpack(content)
    return Seen(steps, stepped, waits > 0, bool(prints_stacks))


def stack_file(path: Path) -> Path:
    """Where a worker whose activity is in `path` writes its stack."""
    return path.with_suffix(".stack")


def show_activity(environ: Mapping[str, str]) -> Activity:
    """In a worker: what to tell, if its launcher looks."""
    named = environ.get(ACTIVITY)
    if not named:
        return NO_ACTIVITY
    try:
        return SharedActivity(Path(named), prints_stacks=_print_stacks(stack_file(Path(named))))
    except OSError:  # a full disk is no reason not to train
        return NO_ACTIVITY


def _print_stacks(target: Path) -> bool:
    """From now on `STACK_SIGNAL` makes this process write its stack to `target`.

    False where the script has a handler of its own. The interpreter writes it at once, also when
    it is deep in a library, and then goes on.
    """
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return False
    faulthandler.register(STACK_SIGNAL, target.open("ab", buffering=0), all_threads=True)
    return True

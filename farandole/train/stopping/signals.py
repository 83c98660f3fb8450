"""Notes the signals that ask this process to stop, whatever its main thread is doing.

Python runs signal handlers in the main thread, between two of its instructions. A rank that waits
inside a collective would hear of a signal only when the collective ends. So the handlers do
nothing, and a thread reads the signals' numbers from the socket that `signal.set_wakeup_fd` writes
to at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import weakref
from types import FrameType

from farandole.errors import UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""A scheduler, or the launcher, wants the job to end; a scheduler says that it soon will."""


class StopSignals:
    """From now on, until `close`. Must be made by the main thread; raises `UserError` elsewhere."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UserError("signals come to the main thread: call run.save_when_stopped() there.")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before = {number: signal.signal(number, _nothing) for number in STOP_SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):
            # Hooks at fork cannot be removed. The weak reference makes this one do nothing when the
            # run is gone; a child must not write into the parent's socket.
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forget(this()))

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Those that have come since the last call; waits for one. In any thread."""
        try:
            if not select.select([self._reader], [], [], seconds)[0]:
                return []
            numbers = self._reader.recv(1024)
        except (OSError, ValueError):  # closed meanwhile
            return []
        return [number for number in STOP_SIGNALS for found in numbers if found == number]

    def close(self) -> None:
        """What the signals did before, they do again. In the main thread, or it does nothing."""
        if self._writer.fileno() < 0:
            return
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)
            for number, handler in self._before.items():
                if signal.getsignal(number) is _nothing:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._writer.close()
            self._reader.close()

    def leave_to_system(self) -> None:
        """In a child that was forked: its signals are not the parent's."""
        if self._writer.fileno() < 0:
            return
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is _nothing:
                    signal.signal(number, signal.SIG_DFL)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The number has been written to the socket by now."""


def _forget(signals: StopSignals | None) -> None:
    if signals is not None:
        signals.leave_to_system()

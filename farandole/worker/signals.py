"""Which signals stop a job, and which must not disturb its end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def exit_code_of(name: str) -> int:
    """What a process that was stopped by the signal of this name exits with: 130 for SIGINT."""
    return 128 + signal.Signals[name]


def stop_signals() -> list[str]:
    """The signals on which the agent stops the workers, apart from Ctrl-C.

    SIGINT is left to Python: a worker that waits inside a collective ignores it, so on Ctrl-C the
    agent must send SIGTERM instead of passing SIGINT on. A signal that is ignored stays so: that is
    what `nohup` asks for.
    """
    stopping = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return [number.name for number in stopping if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def handlers_kept() -> Iterator[None]:
    """The agent sets signal handlers of its own and leaves them; the caller gets its own back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped(KeyboardInterrupt):
    """A signal that asks us to stop, by its name; raised where Ctrl-C would be."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def signals_raised() -> Iterator[None]:
    """Inside, a signal that asks us to stop raises `Stopped`."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(signal.Signals(number).name)

    with handlers_kept():
        for name in ("SIGINT", *stop_signals()):
            if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN:
                signal.signal(signal.Signals[name], stop)
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, a second Ctrl-C does nothing: it would only leave workers behind."""
    with handlers_kept():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        yield


@contextmanager
def warnings_passed_on(send: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside, SIGUSR1 goes to the workers: a scheduler warns that it will end the job."""
    before = signal.signal(signal.SIGUSR1, lambda number, _: send(signal.Signals(number)))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def signals_noted() -> Iterator[list[str]]:
    """Collects the names of signals that ask us to stop, instead of raising just anywhere."""
    received: list[str] = []
    with handlers_kept():
        for name in ("SIGINT", *stop_signals()):
            number = signal.Signals[name]
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda got, _: received.append(signal.Signals(got).name))
        yield received

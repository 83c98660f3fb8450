"""What happens when a process of DataLoader's dies: killed by hand, or for lack of memory.

DataLoader raises then, and its other processes end. The batches that were not handed out are loaded
again by new processes, in the same order: nothing is lost or repeated. That is done once. Where one
dies again there is a reason for it, such as too little memory, which no repetition removes.

DataLoader also raises from a handler of SIGCHLD, in whatever the script does at that moment, where
nobody can go on. So that handler is taken away again; it looks at its processes whenever it waits
for them anyway.
"""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from farandole.errors import DataError

_ENDING_SECONDS: Final = 2.0


class ProcessLostError(Exception):
    """One of the processes has died. The rest is to be loaded anew, by others."""


class LoadingProcesses:
    """Those of one loader, which die at most once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.has_lost = False

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """What the loader gives, which is of no use after an error. Raises `ProcessLostError` when
        a process of its has died, and `DataError` when that happens for the second time."""
        with _without_handler():
            iterator = iter(loader)
        processes: list[Any] = list(getattr(iterator, "_workers", ()))  # none: it loads by itself
        try:
            while True:
                self._look_after(processes, None)  # some may have died since the last batch
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except Exception as error:
                    if isinstance(error, (OSError, EOFError)):
                        _wait_for_one(processes)  # a connection may break before its process ends
                    self._look_after(processes, error)
                    raise  # it is a sample's own
                yield batch
        except Exception:
            _end(iterator, processes)
            raise

    def _look_after(self, processes: list[Any], error: Exception | None) -> None:
        dead = _dead(processes)
        if not dead:
            return
        named = ", ".join(
            f"{processes.index(each)} of {len(processes)} (pid {each.pid}) {_how(each.exitcode)}"
            for each in dead
        )
        said = f"loading process {named}, on rank {self._rank}"
        if self.has_lost:
            raise DataError(
                f"{said}, after another one had. If the machine lacks memory, use fewer "
                "num_workers, a smaller prefetch_factor, or smaller chunks; num_workers=0 shows "
                "errors where they happen."
            ) from error
        self.has_lost = True
        warnings.warn(
            f"{said}. New ones load what it had not handed over. If one dies again, that is an "
            "error.",
            stacklevel=2,
        )
        raise ProcessLostError


def _dead(processes: list[Any]) -> list[Any]:
    return [each for each in processes if each.exitcode not in (None, 0)]


def _end(iterator: Any, processes: list[Any]) -> None:
    """Whatever a killed process shared with others may be locked for ever, and DataLoader's own way
    to end its processes would wait for that. So it is told that it has ended them."""
    if not processes:
        return
    vars(iterator).update(_shutdown=True, _worker_pids_set=False)
    signal_handling._remove_worker_pids(id(iterator))
    for each in processes:
        each.kill()
    for each in processes:
        each.join(_ENDING_SECONDS)
    pinning = getattr(iterator, "_pin_memory_thread_done_event", None)
    if pinning is not None:
        pinning.set()


def _wait_for_one(processes: list[Any]) -> None:
    running = {each.sentinel: each for each in processes if each.exitcode is None}
    for sentinel in multiprocessing.connection.wait(list(running), _ENDING_SECONDS):
        running[sentinel].join(_ENDING_SECONDS)  # its files are closed before all its threads end


def _how(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (by hand, or for lack of memory)" if code == -9 else "")


@contextmanager
def _without_handler() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has handlers
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)

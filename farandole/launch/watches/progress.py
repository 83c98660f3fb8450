"""How far a worker has come, as its launcher knows it: by its own look, or from another host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farandole.system.activity import STACK_SIGNAL, Seen, read_activity, stack_file
from farandole.system.process_state import handles, is_stopped


@dataclass(frozen=True)
class Progress:
    """`seen` has times of this host's clock."""

    seen: Seen | None = None  # None: the worker has not called `fd.init` so far
    is_stopped: bool = False  # by SIGSTOP
    can_print: bool = False  # its stack, on `STACK_SIGNAL`; without a handler it would die of it
    printed_bytes: int = 0  # of stacks so far


def progress_of(pid: int, path: Path) -> Progress:
    """Of a process of this host, whose activity is in `path`."""
    seen = read_activity(path)
    if seen is None:
        return Progress()
    can_print = seen.prints_stacks and handles(pid, STACK_SIGNAL)
    return Progress(seen, is_stopped(pid), can_print, _size(stack_file(path)))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0

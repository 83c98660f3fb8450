"""Functions run in threads, under Horovod's names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from farandole.errors import UserError


def in_thread(
    target: Callable[..., object],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts `target(*args)` in a thread, and returns it. `silent`: what it raises is dropped."""
    if not isinstance(args, tuple):
        raise UserError(f"args must be a tuple, not a {type(args).__name__}: (value,) is one.")
    does = _silently(target) if silent else target
    thread = threading.Thread(target=does, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., object],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls `func(*args)` when `event` is set, once, and ends; it also ends
    when `stop` is set, of which it looks that often."""

    def wait() -> None:
        while not event.wait(check_stop_interval_s if stop is not None else None):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls `fn` with each of the lists of arguments, at most so many at once.

    Returns the results by the place of their arguments; None where they are not waited for. What
    the first of them to fail has raised is raised here.
    """
    if not args_list:
        return {} if block_until_all_done else None
    pool = ThreadPoolExecutor(min(max_concurrent_executions, len(args_list)))
    futures = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    return {place: future.result() for place, future in enumerate(futures)}


def _silently(target: Callable[..., object]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        with suppress(Exception):
            target(*args)

    return call

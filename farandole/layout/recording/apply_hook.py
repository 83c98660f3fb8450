"""The one place where calls of `torch.autograd.Function.apply` are seen, in the whole process.

`apply` passes below `__torch_function__` and below torch.fx. Torch's own `Function.apply` asks the
class below it, `_SingleLevelFunction`, for this name. That class is changed here and not
`Function`, because `rounded = Round.apply` at the top of a file has bound the one above.

    recording   watches for a while      asked first: what is recorded must not be computed on tiles
    tiles       watch for good           asked next
    torch       computes what none of them wants

Invariant: `_SingleLevelFunction` has an `apply` of its own exactly while somebody watches. Watchers
are a tuple that is replaced as a whole, under the lock of `process_lock`: calls in other threads
read the old one or the new one, and never half of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import Function, _SingleLevelFunction

from farandole.layout.recording.state.restored import process_lock

Watcher = Callable[[type[Function], tuple[Any, ...], dict[str, Any]], Any]
"""Is given a call, of any thread, and returns its result; NotImplemented: it is none of its own."""

_watchers: tuple[Watcher, ...] = ()


def watch(watcher: Watcher) -> None:
    """From now on. A watcher that is known already is not added again."""
    with process_lock():
        if watcher not in _watchers:
            _set((*_watchers, watcher))


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside. This watcher is asked before those that watch for good."""
    with process_lock():
        _set((watcher, *_watchers))
    try:
        yield
    finally:
        with process_lock():
            _set(tuple(each for each in _watchers if each is not watcher))


def _set(watchers: tuple[Watcher, ...]) -> None:
    global _watchers
    _watchers = watchers
    base: Any = _SingleLevelFunction
    if watchers and "apply" not in vars(base):
        base.apply = classmethod(_apply)
    elif not watchers and "apply" in vars(base):
        del base.apply


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    for watcher in _watchers:
        result = watcher(cls, args, kwargs)
        if result is not NotImplemented:
            return result
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)(*args, **kwargs)

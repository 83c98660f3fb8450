"""Where the time of loading goes: opening, reading, decoding, transforming, collating, copying.

Some batches are loaded once more, one sample after the other, in this process. Clocks are put
around the parts that can be told apart from outside, and are taken away again. The time of a part
does not contain that of a part within it: opening is no reading.
"""

from __future__ import annotations

import builtins
import copy
import io
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from farandole.data.chunks.dataset import ChunkedDataset


class StageClock:
    """Seconds by stage. The stage that was entered last has the time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._stack:  # another thread's, or after the measurement
                return function(*args, **kwargs)
            with self.stage(name):
                return function(*args, **kwargs)

        return timed


def time_stages(
    dataset: Any,
    batches: Iterable[Sequence[int]],
    collate: Callable[[list[Any]], Any],
    to_device: Callable[[Any], Any],
) -> dict[str, float]:
    """Seconds for one sample, by stage, the stages in the order in which they happen."""
    clock, samples = StageClock(), 0
    chunked = isinstance(dataset, ChunkedDataset)
    rest = "decode" if chunked else "read and decode"
    with ExitStack() as stack:
        if chunked:
            dataset = copy.copy(dataset)  # with chunks of its own, all of which it has to read
            dataset.ahead = 0
            for source in dataset.sources:
                stack.enter_context(_replaced(source, "read", _reading(clock, source.read)))
        inner = _innermost(dataset)
        for name in ("transform", "target_transform"):
            found = getattr(inner, name, None)
            if callable(found):
                timed = clock.around("transform", found)
                stack.enter_context(_replaced(inner, name, timed))
        stack.enter_context(_replaced(os, "pread", clock.around("read", os.pread)))
        for module in (builtins, io, os):
            stack.enter_context(_replaced(module, "open", clock.around("open", module.open)))
        for batch in batches:
            samples += len(batch)
            with clock.stage(rest):
                loaded = [dataset[index] for index in batch]
            with clock.stage("collate"):
                whole = collate(loaded)
            with clock.stage("copy"):
                to_device(whole)
    order = ("open", "read", "read and decode", "decode", "transform", "collate", "copy")
    return {name: clock.seconds[name] / max(1, samples) for name in order if name in clock.seconds}


class _TimedRows(Sequence[Any]):
    """Samples are decoded when they are taken out of a chunk."""

    def __init__(self, rows: Sequence[Any], clock: StageClock) -> None:
        self._rows = rows
        self._clock = clock

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        with self._clock.stage("decode"):
            return self._rows[row]


def _reading(clock: StageClock, read: Callable[[int], Sequence[Any]]) -> Callable[[int], Any]:
    timed = clock.around("read", read)
    return lambda chunk: _TimedRows(timed(chunk), clock)


def _innermost(dataset: Any) -> Any:
    """Of subsets, the dataset that they are subsets of."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name, owner)  # `owner` itself stands for: not its own, its class's
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

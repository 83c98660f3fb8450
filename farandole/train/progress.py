"""Progress on rank 0: a live bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from farandole.data import BatchInfo

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class EpochProgress:
    """Follows one loader through one epoch at a time. Costs a clock reading per batch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # Not at the top: the ranks that show nothing need not wait for it.
        from rich.console import Console

        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live = self._console.is_terminal  # which takes its time to find out
        self._bar: Progress | None = None
        self._samples = 0
        self._began = self._shown = 0.0

    def batch(self, epoch: int, info: BatchInfo) -> None:
        now = time.perf_counter()
        if info.step == 0 or not self._began:
            self._began = self._shown = now
            self._samples = 0
        self._samples += info.samples
        if now - self._shown < (_REDRAW_SECONDS if self._live else _LINE_SECONDS):
            return
        self._shown = now
        rate = f"{self._samples / (now - self._began):,.0f} samples/s"
        if self._live:
            self._draw(epoch, info, rate)
        else:
            done = f"{info.step + 1:,}" + (f" of {info.steps:,}" if info.steps else "")
            self._console.print(f"epoch {epoch}: step {done}, {rate}", soft_wrap=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._began = 0.0

    def print(self, line: str) -> None:
        """A line that does not collide with the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            # A character that the locale has no bytes for, such as our dot, must not end a run.
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(line.encode(encoding, "replace").decode(encoding), flush=True)

    def _draw(self, epoch: int, info: BatchInfo, rate: str) -> None:
        from rich import progress

        if self._bar is None:
            self._bar = progress.Progress(
                progress.TextColumn("epoch {task.fields[epoch]}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._bar.add_task("", total=info.steps, epoch=epoch, rate=rate)
            self._bar.start()
        task = self._bar.task_ids[0]
        done, total = info.step + 1, info.steps
        self._bar.update(task, completed=done, total=total, epoch=epoch, rate=rate, refresh=True)

"""Progress of a fit, for `verbose`: a live bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class PassProgress:
    """Told of what happens; this one shows nothing."""

    def piece(self, done: int, total: int) -> None:
        """So many pieces of this pass have an answer."""

    def passed(self, number: int, seconds: float, bytes_moved: int) -> None:
        """A pass is over; `bytes_moved` are those of all passes."""

    def note(self, text: str) -> None:
        """What the algorithm has reached, such as a loss."""

    def end(self) -> None:
        """The fit is over, well or not."""


class ShownProgress(PassProgress):
    """On standard error, or `stream`."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        # Not at the top: a fit that shows nothing need not wait for it.
        from rich.console import Console

        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._name = name
        self._bar: Progress | None = None
        self._shown = time.perf_counter()
        self._pieces = (0, 0)
        self._text = ""
        self._noted = ""

    def piece(self, done: int, total: int) -> None:
        self._pieces = (done, total)
        if self._console.is_terminal:
            self._show()

    def passed(self, number: int, seconds: float, bytes_moved: int) -> None:
        self._text = f"pass {number}, {seconds:.3g} s, {bytes_moved / 1e6:,.1f} MB moved"
        self._show()

    def note(self, text: str) -> None:
        self._noted = f", {text}"

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._text:
            self._print()

    def _show(self) -> None:
        live = self._console.is_terminal
        now = time.perf_counter()
        if now - self._shown < (_REDRAW_SECONDS if live else _LINE_SECONDS):
            return
        self._shown = now
        if live:
            self._draw()
        else:
            self._print()

    def _print(self) -> None:
        line = f"{self._name}: {self._text}{self._noted}"
        self._console.print(line, soft_wrap=True, markup=False)

    def _draw(self) -> None:
        from rich import progress

        done, total = self._pieces
        if self._bar is None:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._bar.add_task("", total=total or None)
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            completed=done,
            total=total or None,
            description=f"{self._name}: {self._text}{self._noted}",
            refresh=True,
        )

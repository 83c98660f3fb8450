"""Passes on what the workers write, each line with its rank in front.

The workers write to files, so that everything is there when something goes wrong. A thread follows
those files. It passes on whole lines only: an unbuffered Python writes a line in several pieces,
and pieces of different ranks must not meet in one line. And it passes them on at once, even into a
pipe. It works on bytes, so that no character can stop it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_POLL_SECONDS = 0.05
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")  # a progress bar ends its lines with a carriage return


class Source:
    """One worker's stream: the file it goes to, the mark of its lines, where they are shown."""

    def __init__(self, path: Path, mark: str, target: BinaryIO, *, timed: bool = False) -> None:
        self._path = path
        self._mark = mark.encode()
        self._timed = timed
        self._target: BinaryIO | None = target
        self._file: BinaryIO | None = None
        self._unfinished = b""

    def pass_on(self, *, last: bool = False) -> None:
        """Shows the lines that have been completed; at the end also one that has not."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        *lines, self._unfinished = _LINE_ENDS.split(self._unfinished + self._file.read())
        if last and self._unfinished:
            lines.append(self._unfinished)
        if lines and self._target is not None:
            try:
                time_stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._timed else ""
                mark = time_stamp.encode() + self._mark
                self._target.write(b"".join(mark + line + b"\n" for line in lines))
                self._target.flush()
            except (OSError, ValueError):  # nobody reads any more; the job goes on
                self._target = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Relay:
    """Follows all sources until it is stopped."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, sources: Sequence[Source]) -> None:
        """These too, from now on."""
        self._sources.extend(sources)

    def stop(self) -> None:
        """Call it when the workers have ended: shows what is left and returns."""
        self._stopped.set()
        self._thread.join()
        for source in self._sources:
            source.pass_on(last=True)
            source.close()

    def _follow(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            for source in list(self._sources):  # more may come meanwhile
                source.pass_on()

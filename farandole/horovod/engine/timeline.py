"""`hvd.start_timeline`: where the time goes, on all ranks, in one file for Perfetto.

Each rank writes what it records to a part of its own. When the timeline is stopped, by a call or by
the end of the script, rank 0 waits a little for the others' parts and makes one file of them. Ranks
that were never told to start one are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.errors import FarandoleError, UserError
from farandole.horovod.engine.engine import Engine
from farandole.trace.clock import Offset
from farandole.trace.merge import merge, part_file, parts_folder, remove_parts, wait_for_ends
from farandole.trace.recorder import Recorder
from farandole.trace.spans import NO_TRACE

_PATIENCE_SECONDS = 10.0  # for ranks that end later than rank 0


class HorovodTimeline:
    """One rank's part. `engines` tell it what they do, from here to `stop`."""

    def __init__(
        self,
        target: Path,
        engines: Sequence[Engine],
        *,
        host: str,
        mark_cycles: bool,
        clock: Offset | None,
    ) -> None:
        self.target = target.absolute()
        self._engines = engines
        self._rank, self._size = engines[0].group.rank, engines[0].group.size
        parts = parts_folder(self.target)
        header = {"rank": self._rank, "size": self._size, "host": host, "pid": os.getpid()}
        try:
            parts.mkdir(parents=True, exist_ok=True)
            self._recorder = Recorder(part_file(parts, self._rank), header)
        except OSError as error:
            raise UserError(
                f"the timeline {target} cannot be written: {error}. Name a file in a folder of "
                "yours."
            ) from error
        if clock is not None:
            self._recorder.note(clock.as_line())
        for engine in engines:
            engine.record(self._recorder, mark_cycles)

    def stop(self) -> None:
        for engine in self._engines:
            engine.record(NO_TRACE, False)
        self._recorder.close()
        if self._rank != 0:
            return
        parts = parts_folder(self.target)
        recorded = [rank for rank in range(self._size) if part_file(parts, rank).exists()]
        wait_for_ends(parts, recorded, _PATIENCE_SECONDS)
        try:
            merged = merge(self.target)
        except FarandoleError as error:  # must not hide how the script ended; the parts stay
            print(f"farandole: {error}", file=sys.stderr)
            return
        remove_parts(self.target)
        print(f"farandole: {merged}", file=sys.stderr)

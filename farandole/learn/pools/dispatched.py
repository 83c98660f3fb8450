"""A source at workers that get their pieces one by one."""

from __future__ import annotations

from typing import Any, Final

from farandole.learn.pools.base import Placed
from farandole.learn.pools.dispatch import Dispatcher
from farandole.learn.pools.workers import LostPoolError, Workers
from farandole.learn.report import nbytes
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import join, pieces

SILENCE_SECONDS: Final = 1800.0
"""So long a pass waits without a word from anybody."""

_PIECES_PER_WORKER = 8


class Dispatched(Placed):
    """`backups`: whether pieces that are slow are computed twice."""

    def __init__(
        self,
        source: Source,
        workers: Workers,
        count: int,
        *,
        backups: bool = True,
        timeout: float = SILENCE_SECONDS,
    ) -> None:
        super().__init__(source)
        self._workers = workers
        self._dispatcher = Dispatcher(workers, backups=backups, timeout=timeout)
        wanted = source.chunks if source.one_by_one else _PIECES_PER_WORKER * count
        self._branches = pieces(source.chunks, wanted)

    @property
    def workers_are_threads(self) -> bool:
        """Of this process."""
        return self._workers.are_threads

    def _statistics(self, job: Sum, state: Any) -> Statistics:
        dispatcher, counts = self._dispatcher, self.counts
        before = dispatcher.backups, dispatcher.losses
        try:
            shared = self._workers.begin(job, state)
            found = dispatcher.run(self._branches, shared, self.progress.piece)
        except LostPoolError as error:
            raise LostPoolError(
                f"in pass {self.passes} over {self.source.name}, {error} Fewer rows in a chunk "
                f"(chunk_rows={self.source.chunk_rows // 2 or 1}) need less memory."
            ) from error
        counts.pieces += len(self._branches)
        counts.backups += dispatcher.backups - before[0]
        counts.losses += dispatcher.losses - before[1]
        counts.bytes_in += nbytes(found)
        counts.bytes_out += nbytes(state) * len(self._branches)
        return join(dict(zip(self._branches, found, strict=True)), self.source.chunks, job.merge)

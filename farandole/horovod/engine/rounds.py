"""A round: all ranks of a process set meet, tell what is new to them, and learn what follows.

Most rounds of a training are about one tensor that all ranks have just asked for and wait for. So a
rank that asks for nothing else offers the tensor along with the asking, and if all do, it is
reduced by the time they know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from farandole.comm.group import Group
from farandole.horovod.engine.execution import Executor
from farandole.horovod.engine.gpus import GpuLinks
from farandole.horovod.engine.stall import StallWatch
from farandole.horovod.engine.table import Announcement, Decision, Response, Table
from farandole.horovod.engine.wire import OFFER, Listener, Speaker, exchange
from farandole.horovod.engine.work import Work
from farandole.horovod.logs import LOGGER
from farandole.horovod.settings import Settings
from farandole.trace.spans import NO_TRACE, Trace

_BEGIN_BYTES = 25 * 2**20  # as much as a bucket of DDP


class Rounds:
    """One rank's end. One thread at a time may use it; all ranks make the same calls."""

    def __init__(
        self,
        group: Group,
        settings: Settings,
        gpus: GpuLinks | None,
        names: Sequence[int] | None = None,
    ) -> None:
        """`names`: see `Table`."""
        self.begin_bytes = _BEGIN_BYTES
        """So much of what nobody waits for yet is worth a round of its own."""
        self._group = group
        self._speaker = Speaker(settings.cache_capacity)
        self._listeners = [Listener(settings.cache_capacity) for _ in range(group.size)]
        self._common: set[str] = set()  # numbers by which all ranks mean the same
        self._table = Table(group.size, settings.fusion_bytes, names)
        self._stall = StallWatch(
            self._table, settings.stall_warning_seconds, settings.stall_shutdown_seconds
        )
        self._executor = Executor(group, gpus)
        self._cycles: Trace = NO_TRACE

    def record(self, trace: Trace, mark_cycles: bool) -> None:
        self._group.trace = trace
        self._cycles = trace if mark_cycles else NO_TRACE

    def meet(self, said: Announcement, offered: Work | None) -> Decision | None:
        """What follows from what all have said. None: what was `offered` has been done."""
        text = self._speaker.write(said)
        if offered is not None and not self._means_the_same(text, offered):
            offered = None
        offer = self._executor.offer(offered) if offered is not None else None
        with self._cycles.span("CYCLE", "comm"), self._telling(offered if offer else None):
            texts = exchange(self._group.transport, text, offer)
        # Every rank reads everything that was said, also its own and also when an offer was taken:
        # listeners number requests by what they have read, and must stay alike on all ranks.
        heard = [listener.read(text) for listener, text in zip(self._listeners, texts, strict=True)]
        # All ranks compare the same texts, so all of them take the offer as done, or none does.
        if offer is not None and texts[0].startswith(OFFER) and texts.count(texts[0]) == len(texts):
            return None
        decision = self._table.hear(heard, time.monotonic())
        if heard[0].tuned:
            self._table.fusion_bytes, self.begin_bytes = heard[0].tuned
            LOGGER.info("fusion and beginning are tuned to %s bytes", heard[0].tuned)
        return decision

    def remember_gpu(self) -> None:
        """See `Executor`."""
        self._executor.remember_gpu()

    def carry_out(self, response: Response, works: Sequence[Work | None]) -> None:
        self._executor.carry_out(response, works)

    def look_for_stalls(self) -> str:
        """On rank 0 alone, so that it is said once and decided by one clock: why the job should
        end, if it should."""
        now = time.monotonic()
        said = self._stall.report(now)
        if said:
            LOGGER.warning(said)
        return self._stall.fatal(now)

    def close(self) -> None:
        self._executor.close()
        self._group.close()

    def _means_the_same(self, text: str, work: Work) -> bool:
        """Whether all who say this mean the same: each rank numbers its requests by itself."""
        if text.startswith("[") or text in self._common:
            return True
        alike = all(listener.knows(text, work.request) for listener in self._listeners)
        if alike:
            self._common.add(text)
        return alike

    def _telling(self, offered: Work | None) -> AbstractContextManager[None]:
        """Around the meeting: in a timeline only if something is done in it."""
        if offered is None:
            return self._group.collective("the negotiation", 0, traced=False)
        name, nbytes = offered.request.name, offered.request.nbytes
        return self._group.collective(f"allreduce of {name!r}", nbytes)

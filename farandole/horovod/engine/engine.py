"""Matches what the ranks of a process set ask for, and does it: in whatever order they ask.

All ranks meet in rounds. In each, everybody tells what is new, hears the others, and does what has
thereby become ready; `table` decides. Who drives the rounds?

    a caller who waits      drives them himself: no other thread has to be woken, which would take
                            longer than a small collective
    the engine's thread     drives them otherwise: a cycle after something was asked for that nobody
                            waits for yet, and once a second for a rank that has nothing to ask for

A rank that waits for another one sleeps in a round until that one comes to it. When all are there
and nothing can be done, because each has asked for something else so far, they meet again after a
pause.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from farandole.comm.gpu.cuda_graphs import refuse_capture
from farandole.comm.group import Group
from farandole.comm.helper import start_helper
from farandole.comm.transports.messages import PeerLost
from farandole.errors import CommError, UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.engine.gpus import GpuLinks
from farandole.horovod.engine.rounds import Rounds
from farandole.horovod.engine.table import Announcement, Decision, Response
from farandole.horovod.engine.tuning import FusionTuner
from farandole.horovod.engine.work import Work
from farandole.horovod.settings import Settings
from farandole.trace.spans import NO_TRACE, Trace

_HEARTBEAT_SECONDS = 1.0  # an idle rank comes to a round so often: the others see that it lives
_TICK_SECONDS = 0.1  # so long may pass before what was asked for quietly is told
_LONGEST_PAUSE_SECONDS = 0.005
_LEAVING_SECONDS = 5.0
_DONE = Decision(is_news=True)


class Engine:
    """One rank's end, of one process set. The group is the engine's alone from here on."""

    def __init__(
        self,
        group: Group,
        settings: Settings,
        gpus: GpuLinks | None = None,
        *,
        names: Sequence[int] | None = None,
        on_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`names` are what the ranks of a process set are called among all. `on_end` is told why
        the engine has ended, by whichever thread finds out."""
        self.group = group
        self._on_end = on_end
        self._pid = os.getpid()
        self._trace: Trace = NO_TRACE
        self._cycle_seconds = settings.cycle_seconds
        self._rounds = Rounds(group, settings, gpus, names)
        self._driving = threading.Lock()  # held in a round
        self._changed = threading.Condition()  # over all that follows
        self._works: dict[str, Work] = {}  # in flight, by name
        self._news: list[Work] = []  # those of them that the others have not been told of
        self._quiet_bytes = 0
        self._joining: Work | None = None
        self._join_is_announced = False
        self._leaving = ""
        self._tuner = (
            FusionTuner(settings.autotune_log) if settings.autotune and group.rank == 0 else None
        )
        self._to_be_tuned: tuple[int, ...] = ()
        self._called = False  # the thread is wanted
        self._ended: str | None = None
        self._last_round = time.monotonic()
        self._fruitless = 0
        self._thread = start_helper(self._serve, "horovod")

    # For callers

    def submit(self, work: Work, *, quiet: bool = False) -> Work:
        """Asks for a collective and returns at once.

        `quiet`: the caller will wait for it, or for something after it; so the thread need not be
        woken for it until a good deal has come together.

        A name that is in flight is refused here. The others never hear of it, and the first request
        stays as it is.
        """
        name = work.request.name
        refuse_capture(f"{name!r}, a collective")
        with self._changed:
            self._require_alive()
            if name in self._works:
                raise UserError(
                    f"{name!r} was asked for again before it was done. Give each tensor in flight "
                    "a name of its own, or synchronize the first one before."
                )
            if self._joining is not None:
                raise HorovodInternalError(f"{name!r} was asked for after hvd.join() by this rank.")
            self._works[name] = work
            self._news.append(work)
            if self._trace is not NO_TRACE:
                work.begin_wait(self._trace)
            if quiet:
                self._quiet_bytes += work.request.nbytes
            if not quiet or self._quiet_bytes >= self._rounds.begin_bytes:
                self._call()
        return work

    def wait(self, work: Work) -> None:
        """Until it is done. Raises what went wrong."""
        while not work.done:
            # Whoever drives lets go after each round: then it is done, or this thread is next.
            if not self._driving.acquire(timeout=_TICK_SECONDS):
                continue
            try:
                fruitful = work.done or self._round(work)
            finally:
                self._driving.release()
            if not fruitful:
                self._pause(work)
        if work.error is not None:
            raise work.error

    def is_done(self, work: Work) -> bool:
        if not work.done and not self._called:
            with self._changed:
                self._call()  # whoever asks again and again wants it done
        return work.done

    def join(self, work: Work) -> None:
        """From now on this rank takes part with nothing. Done when all ranks have joined."""
        with self._changed:
            self._require_alive()
            if self._joining is not None:
                raise UserError("hvd.join() is under way on this rank already. Wait for it.")
            self._rounds.remember_gpu()
            self._joining = work
            self._join_is_announced = False
            self._call()

    def record(self, trace: Trace, mark_cycles: bool) -> None:
        """From now on what is done is told to `trace`, and with `mark_cycles` every round."""
        self._trace = trace
        self._rounds.record(trace, mark_cycles)

    def leave(self, reason: str) -> None:
        """Asks for nothing more, and tells the others in the next round, which ends the engine on
        all ranks. Waits for nobody."""
        with self._changed:
            if self._ended is None:
                self._leaving = reason
                self._call()

    def close(self, reason: str) -> None:
        """Leaves, and gives back what the engine holds."""
        self.leave(reason)
        self._thread.join(_LEAVING_SECONDS)  # longer only if a rank does not answer at all
        # Whoever has not come to a round meanwhile comes later, and must not wait for this rank.
        self._fail(f"this rank {reason}")
        self._rounds.close()

    # Rounds

    def _round(self, awaited: Work | None = None) -> bool:
        """Meets all ranks once; returns whether anything came of it. Holds `_driving`.

        If nothing else is on its way, what is `awaited` is offered along with its announcement.
        """
        with self._changed:
            if self._ended is not None:
                return True
            # Only a work that is alone may be offered: others in flight would have to keep their
            # order with it, and the table, which decides that order, does not hear of an offer that
            # was taken.
            alone = len(self._works) == 1 and self._news == [awaited]
            said = self._next_announcement()
        offered = awaited if alone and said.is_plain else None
        try:
            decision = self._rounds.meet(said, offered)
            if decision is None:
                assert offered is not None
                self._end_offered(offered)
                decision = _DONE
            for response in decision.responses:
                self._carry_out(response)
            self._last_round = time.monotonic()
            self._conclude(decision)
            if decision.responses:
                self._wake_sleepers()
        except CommError as error:
            self._end(str(error).rstrip("."))
            return True
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return True
        except BaseException:  # Ctrl-C in the middle of it: the round cannot be taken up again
            self._fail("was interrupted")
            raise
        return decision.is_news

    def _conclude(self, decision: Decision) -> None:
        """What follows for this rank when everything that was ready has been done."""
        if decision.last_joined is not None:
            self._end_join(decision.last_joined)
        if decision.leaving:
            reasons = "; ".join(f"rank {rank} {why}" for rank, why in decision.leaving)
            self._end(reasons)
        self._fruitless = 0 if decision.is_news else self._fruitless + 1
        if not decision.is_news and self.group.rank == 0:
            fatal = self._rounds.look_for_stalls()
            if fatal:
                self._leaving = f"ended the job: {fatal}"

    def _next_announcement(self) -> Announcement:
        joins = self._joining is not None and not self._join_is_announced
        requests = tuple(work.request for work in self._news)
        said = Announcement(requests, joins, self._leaving, self._to_be_tuned)
        self._to_be_tuned = ()
        self._join_is_announced |= joins
        self._news = []
        self._quiet_bytes = 0
        self._called = False
        return said

    def _end_offered(self, work: Work) -> None:
        """All have asked for the same, and it was done along with the asking."""
        with self._changed:
            del self._works[work.request.name]
        work.end_wait()
        work.end()
        if self._tuner is not None:
            self._tune(self._tuner, work.request.nbytes)

    def _carry_out(self, response: Response) -> None:
        with self._changed:
            # Taken out of flight before it is performed. A caller who is woken by its end may ask
            # for the same name at once.
            works = [self._works.pop(item.name, None) for item in response.items]
        for work in works:
            if work is not None:
                work.end_wait()
        if response.error:
            self._tell(works, response.error)
            return
        try:
            if works[0] is not None and works[0].perform is not None:
                works[0].perform()
            else:
                self._rounds.carry_out(response, works)
        except Exception as error:
            self._tell(works, str(error))
            raise
        for work in works:
            if work is not None:
                work.end()
        if self._tuner is not None:
            self._tune(self._tuner, sum(item.like.nbytes for item in response.items))

    def _tune(self, tuner: FusionTuner, nbytes: int) -> None:
        tuned = tuner.saw(nbytes)
        if tuned is not None:
            with self._changed:
                self._to_be_tuned = tuned

    def _tell(self, works: Sequence[Work | None], error: str) -> None:
        for work in works:
            if work is not None:
                work.end(HorovodInternalError(error))

    def _end_join(self, last: int) -> None:
        with self._changed:
            work, self._joining = self._joining, None
        assert work is not None
        work.last_joined = last
        work.end()
        self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        """Threads that sleep until the next round, and whose work another one has done."""
        with self._changed:
            self._changed.notify_all()

    def _pause(self, work: Work) -> None:
        """After a round in which nobody had anything to say. Others may ask for more meanwhile."""
        with self._changed:
            self._changed.wait_for(
                lambda: work.done or bool(self._news) or self._called, self._pause_seconds()
            )

    def _pause_seconds(self) -> float:
        longer = self._cycle_seconds * float(1 << min(self._fruitless, 8))
        return min(longer, max(_LONGEST_PAUSE_SECONDS, self._cycle_seconds))

    # The thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._called or bool(self._ended), self._nap())
                if self._ended is not None:
                    return
                if not self._is_due():
                    continue
                if self._news:
                    # Nobody waits for it yet, and more may follow: told together it takes fewer
                    # rounds, and a name that follows at once is still found in flight.
                    self._changed.wait_for(
                        lambda: bool(self._ended or self._leaving), self._cycle_seconds
                    )
            if not self._driving.acquire(timeout=_TICK_SECONDS):
                continue  # a caller drives
            try:
                with self._changed:
                    due = self._is_due()  # a caller may have done it meanwhile
                if due:
                    self._round()
            finally:
                self._driving.release()

    def _nap(self) -> float:
        """How long the thread may sleep if nobody calls it."""
        if len(self._works) > len(self._news) or self._joining is not None:
            return self._pause_seconds() if self._fruitless else 0.0
        return _TICK_SECONDS

    def _is_due(self) -> bool:
        idle = time.monotonic() - self._last_round
        return (
            self._called
            or bool(self._works)
            or self._joining is not None
            or idle >= _HEARTBEAT_SECONDS
        )

    def _call(self) -> None:
        self._called = True
        self._changed.notify_all()

    def _require_alive(self) -> None:
        if os.getpid() != self._pid:
            raise HorovodInternalError(
                f"hvd was initialized in process {self._pid}, and this is process {os.getpid()}, "
                "which was forked off: a DataLoader's worker, say. Collectives are for the former."
            )
        ended = self._ended or (f"this rank {self._leaving}" if self._leaving else "")
        if ended:
            raise HorovodInternalError(
                f"this group of ranks has ended: {ended}. Call hvd.shutdown() and hvd.init() to "
                "form a new one."
            )

    def _fail(self, reason: str) -> None:
        """This rank cannot go on, and the others must not wait for it, unless they know already."""
        if self._end(reason):
            with contextlib.suppress(Exception):  # they notice later by themselves
                self.group.transport.blame(PeerLost([self.group.rank], reason))

    def _end(self, reason: str) -> bool:
        """Whoever waits is told. Returns False where it has ended before."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = reason
            works = [*self._works.values()]
            if self._joining is not None:
                works.append(self._joining)
            self._works.clear()
            self._news.clear()
            self._joining = None
            self._changed.notify_all()
        self._on_end(reason)  # before anybody who waits here goes on, to a process set perhaps
        for work in works:
            work.end(HorovodInternalError(f"{work.request.name!r} was not done: {reason}."))
        return True

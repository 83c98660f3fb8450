"""One rank's part in a job whose workers come and go.

a collective breaks     `recover`: the survivors form the next generation, compare how far each
                        has come, and repeat what was interrupted
between two steps       `between_steps`: lets in new workers that are ready, all at the same
                        step: rank 0 hears of them, and says so in the meeting after a step
a new worker            `rehearse` up to its training, then `join_running`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch

from farandole.comm import Group
from farandole.comm.units import Units
from farandole.data import Loader
from farandole.errors import CommError, JoinError, UserError
from farandole.train.elastic.loss_watch import LossWatch
from farandole.train.elastic.meeting import MeetingNews, StepMeeting
from farandole.train.elastic.setup_log import SetupLog
from farandole.train.elastic.status import Status, Verdict, judge
from farandole.train.elastic.transfer import share_state
from farandole.train.session import Session
from farandole.train.stopping.agreement import StopAgreement
from farandole.worker import elastic
from farandole.worker.generations import Generations, Joined

T = TypeVar("T")
_PATIENCE = timedelta(seconds=600)  # of a new worker with the others, before their training


class ElasticTraining:
    """Made with the group, before the run; `attach` makes it act on the run."""

    def __init__(self, group: Group, generations: Generations, joined: Joined) -> None:
        self._group = group
        self._generations = generations
        self._store = elastic.elastic_store(os.environ, _PATIENCE)
        self._life = joined.life
        self._log: SetupLog | None = self._new_log("before its training")
        self._units = Units(self, lambda: group.is_broken)
        self._meeting = StepMeeting(group, generations)
        self._watch = LossWatch()
        self._watch.follow(generations.generation, group.transport)
        self._settles_after: int | None = None  # the unit after which the data are dealt anew
        self._dealt = generations.generation  # the generation to whose workers they are dealt now
        self._is_new = joined.transport is None
        self._entries = 0  # of the log of the epoch under way, when it ended
        self._to_catch_up = 0  # of them, in a worker that joins in the middle of it
        self._last_step = self._saved_after = -1  # units: of the last step, and before a save
        self._session: Session | None = None
        self._loaders: Iterable[Loader] = ()
        self._units.record = self._record
        if self._is_new:
            self._units.rehearse = self._rehearse
        group.units = self._units

    def stop_agreement(self) -> StopAgreement:
        """How all ranks come to stop at the same step, when one is told to."""
        return MeetingNews(self._meeting)

    def ask_for_saves(self, is_due: Callable[[], bool]) -> None:
        """`is_due` is asked on rank 0 in the meeting after each step."""
        self._meeting.asks_for_save = is_due

    def is_time_to_save(self) -> bool:
        """Whether all ranks have heard after the last step that they are to save; once."""
        after = self._meeting.save_after
        if after < 0 or after != self._last_step or after == self._saved_after:
            return False
        self._saved_after = after
        return True

    @property
    def life(self) -> int:
        """How often the job has begun from nothing before."""
        return self._life

    def name_before(self) -> str | None:
        """The run's name, if an earlier life of the job has chosen one."""
        return self._store.get("name").decode() if self._store.check(["name"]) else None

    def keep_name(self, name: str) -> None:
        self._store.set("name", name)

    def attach(self, session: Session, loaders: Iterable[Loader]) -> None:
        self._session, self._loaders = session, loaders

    @property
    def is_new(self) -> bool:
        """Whether this worker is about to join a job that is under way."""
        return self._is_new

    # What happened before the training, for workers that come later

    def _new_log(self, phase: str) -> SetupLog:
        return SetupLog(self._store, f"{self._life}/{phase}", _PATIENCE)

    def _record(self, result: object) -> None:
        if self._log is not None:
            self._log.write(result, writes=self._group.rank == 0)

    def _rehearse(self, changed: torch.Tensor | None) -> Any:
        assert self._log is not None
        return self._log.read(changed)

    def as_one(self, work: Callable[[], T]) -> T:
        """What `work` returns, which is kept for new workers in place of the collectives in it."""
        if self._units.rehearse is not None:
            return self._units.rehearse(None)  # type: ignore[no-any-return]
        result = self.unrecorded(work)
        self._record(result)
        return result

    def unrecorded(self, work: Callable[[], T]) -> T:
        """What `work` returns. New workers do not repeat it."""
        log, self._log = self._log, None
        try:
            return work()
        finally:
            self._log = log

    def end_setup(self) -> None:
        """A batch is about to be handed out: nobody joins between here and the next epoch."""
        if self._log is None:
            return
        if self._to_catch_up:
            raise JoinError(
                f"this worker has joined a job that is under way, and its script calls "
                f"{self._to_catch_up} collectives less {self._log.phase} than the others have. All "
                "ranks must call the same ones."
            )
        self._log.end(writes=self._group.rank == 0)
        self._entries = self._log.entries
        self._log = None

    def begin_epoch(self, epoch: int) -> None:
        """New workers join where they begin an epoch; the collectives up to its first batch are
        kept for those that join in the middle of it."""
        if self._log is not None:
            self._log.end(writes=self._group.rank == 0)
        self._log = self._new_log(f"at the beginning of epoch {epoch}")
        if self._to_catch_up:
            self._units.rehearse = self._catch_up

    def _catch_up(self, changed: torch.Tensor | None) -> Any:
        result = self._rehearse(changed)
        self._to_catch_up -= 1
        if not self._to_catch_up:
            self._units.rehearse = None
        return result

    # A loss

    def meet(self, *, after_step: bool) -> None:
        if after_step:
            self._meeting.hold(self._units.number)
        else:
            self._group.barrier()

    def unit_over(self, unit: int, *, is_step: bool) -> None:
        if self._settles_after is not None and unit >= self._settles_after:
            self._deal(self._generations.generation, self._group.members)
        if is_step:
            self._contribute()
            self._last_step = unit
            self._meeting.step_over()

    def recover(self, unit: int, *, is_done: bool, is_step: bool) -> bool:
        own = self._own_status(unit, "done" if is_done else "working")
        return self._regroup(own, elastic.BROKEN, is_step=is_step)

    def _own_status(self, unit: int, state: Any) -> Status:
        meeting = self._meeting
        return Status(
            unit, state, self._dealt, self._group.readers, meeting.heard_signal, meeting.save_after
        )

    def _regroup(self, own: Status, kind: str, *, is_step: bool) -> bool:
        """Goes on with the survivors. Returns whether this rank's unit is over."""
        began = time.monotonic()
        self._group.transport.abandon()
        while True:
            joined = self._generations.join(kind, self._steps)
            verdict = _compare(joined, own)
            if verdict is not None:
                break
            kind = elastic.BROKEN
        self._settle(verdict, own, joined, is_step=is_step)
        self._report(joined, time.monotonic() - began)
        return verdict.is_over

    def _settle(self, verdict: Verdict, own: Status, joined: Joined, *, is_step: bool) -> None:
        # The order matters. First what was over before the loss, as those who were ahead have seen
        # it; then the loss, for all that is not over.
        if verdict.missed is not None:
            self._deal(verdict.missed.dealt, verdict.missed.readers)
        if verdict.is_over and is_step:
            self._contribute()
            self._last_step = own.unit
        self._lose(joined.members, within_step=is_step and not verdict.is_over)
        self._go_on(joined)
        self._meeting.heard_signal = verdict.signal
        self._meeting.save_after = verdict.save_after
        # The data are dealt anew after the same unit on all ranks: the one that the furthest is in,
        # and has drawn batches for that others have yet to draw.
        if verdict.is_over and own.unit == verdict.top:
            self._deal(self._generations.generation, joined.members)
        else:
            self._settles_after = verdict.top

    def _go_on(self, joined: Joined) -> None:
        assert joined.transport is not None
        self._group.go_on(joined.transport, joined.members)
        self._meeting.restart()
        self._watch.follow(self._generations.generation, joined.transport)

    def _lose(self, alive: tuple[int, ...], *, within_step: bool) -> None:
        before, own = self._group.members, self._generations.worker
        factors: set[float] = set()
        for loader in self._trained():
            factors |= loader.dealings.rescaling(own, before, alive)
            lost = loader.dealings.lost_samples(before, alive)
            if self._session is not None:
                self._session.progress.samples -= lost
        if len(factors) > 1:
            raise UserError(
                f"a worker was lost while gradients of several batches of different sizes were "
                f"being added up: their weights change by {sorted(factors)}, and the sum cannot be "
                "corrected. Use a number of samples per batch that all workers share evenly."
            )
        for factor in factors - {1.0}:
            for synchronizer in self._session.models.synchronizers if self._session else ():
                synchronizer.rescale(factor, within_step=within_step)

    def _deal(self, generation: int, readers: tuple[int, ...]) -> None:
        for loader in self._trained():
            loader.deal_anew(readers)
        self._group.readers = readers
        self._settles_after = None
        self._dealt = generation

    def _contribute(self) -> None:
        for loader in self._trained():
            loader.dealings.contribute()

    def _trained(self) -> Iterator[Loader]:
        """The loaders whose pass over training data is under way."""
        return (each for each in self._loaders if each.is_under_way and each.trains)

    @property
    def _steps(self) -> int:
        return 0 if self._session is None else self._session.progress.steps

    def _report(self, joined: Joined, seconds: float) -> None:
        session = self._session
        if session is None:
            return
        session.take_rank()
        session.print(
            f"{self._group.size} workers go on at step {self._steps}, after {seconds:.1f} s"
        )

    # Newcomers

    def between_steps(self) -> None:
        """*Together.* Lets in new workers if all have heard that there are any."""
        if not self._meeting.has_newcomers or any(
            each.dealings.contributed < each.dealings.handed_out for each in self._trained()
        ):
            return
        began = time.monotonic()
        own = self._own_status(self._units.number, "over")
        self._group.transport.abandon()
        joined = self._generations.join(elastic.WITH_STATE, self._steps)
        if not joined.admits:  # somebody was lost: first the others
            self._after_loss(joined, own)
        elif not self._share(joined):
            self._regroup(own, elastic.BROKEN, is_step=False)
        else:
            self._report(joined, time.monotonic() - began)

    def join_running(self) -> None:
        """In a new worker: waits until the others let it in, and gets their state."""
        while self.is_new:
            joined = self._generations.join(elastic.WITHOUT_STATE)
            if not self._share(joined):
                continue
            self._units.rehearse = None
            self._is_new = False
            assert self._session is not None
            self._session.joined_later = True
            self._generations.has_state()
            self._report(joined, 0.0)

    def _after_loss(self, joined: Joined, own: Status) -> None:
        verdict = _compare(joined, own)
        if verdict is None:
            self._regroup(own, elastic.BROKEN, is_step=False)
            return
        self._settle(verdict, own, joined, is_step=False)
        self._report(joined, 0.0)

    def _share(self, joined: Joined) -> bool:
        """*Together.* Rank 0's state for all. False: a rank was lost meanwhile."""
        assert self._session is not None
        self._go_on(joined)
        try:
            with self._units.outside():
                entries = self._entries if self._log is None else self._log.entries
                here = {"unit": self._units.number, "entries": entries}
                position = share_state(self._session, self._loaders, here, is_new=self.is_new)
                self._group.barrier()
        except CommError:
            if not self._group.is_broken:
                raise
            return False
        self._units.number = position["unit"]
        if self.is_new:
            self._to_catch_up = position["entries"]
        self._deal(self._generations.generation, joined.members)
        return True


def _compare(joined: Joined, own: Status) -> Verdict | None:
    """*Together.* What follows for this rank; None: another rank was lost meanwhile."""
    assert joined.transport is not None
    try:
        told = Group(joined.transport).gather_json(own)
    except CommError:
        joined.transport.abandon()
        return None
    return judge(own, [Status.read(fields) for fields in told])

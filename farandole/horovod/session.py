"""What `hvd.init()` makes and `hvd.shutdown()` ends: this process's place among the ranks, and an
engine for every process set that it is in.

Horovod's functions name no object, so there must be one that they all mean. It is kept here and
nowhere else: for each thread in the in-process world of the tests, where threads are ranks, and
otherwise for the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from farandole.comm.framework_versions import require_same_frameworks
from farandole.comm.group import Group
from farandole.errors import UserError
from farandole.horovod.common.exceptions import NotInitialisedError
from farandole.horovod.common.process_sets import ProcessSet, as_process_set, take_sessions_from
from farandole.horovod.engine.engine import Engine
from farandole.horovod.engine.gpus import GpuLinks
from farandole.horovod.engine.requests import ADD_SET, REMOVE_SET, Request
from farandole.horovod.engine.timeline import HorovodTimeline
from farandole.horovod.engine.work import Work
from farandole.horovod.logs import LOGGER, set_level
from farandole.horovod.settings import Settings
from farandole.horovod.world import JobConnection
from farandole.system.orphans import end_with_launcher
from farandole.topology import Topology
from farandole.trace.clock import Offset, offset_over_group
from farandole.worker.environment import RankAssignment
from farandole.worker.failure import record_leaving, record_uncaught
from farandole.worker.marker_files import record_joined
from farandole.worker.threads import share_cores


class Session:
    """One rank's place, from `init` to `shutdown`."""

    def __init__(
        self,
        assignment: RankAssignment,
        group: Group,
        topology: Topology,
        settings: Settings,
        clock: Offset | None = None,
        gpus: GpuLinks | None = None,
    ) -> None:
        """`clock` is what this host's differs from rank 0's by."""
        self.assignment = assignment
        self.rank = group.rank
        self.size = group.size
        self.transport = group.transport.name
        self.topology = topology
        self.settings = settings
        self.counters: Counter[tuple[int, str]] = Counter()  # of names that were not given
        self._engines: dict[int, Engine] = {}
        self._engines[0] = Engine(group, settings, gpus, on_end=self._leave_sets)
        self._gpus = gpus
        self._sets: dict[int, ProcessSet] = {}
        self._next_set = 1
        self._optimizers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._numbered: Counter[int] = Counter()  # optimizers, by process set
        self._clock = clock
        self._timeline: HorovodTimeline | None = None

    # Who is where

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        return self.topology.local_size(self.rank)

    @property
    def _like_me(self) -> list[int]:
        """By host, those that have this rank's place on theirs."""
        place = self.local_rank
        return [host.ranks[place] for host in self.topology.hosts if len(host.ranks) > place]

    @property
    def cross_rank(self) -> int:
        return self._like_me.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self._like_me)

    @property
    def is_homogeneous(self) -> bool:
        return len({len(host.ranks) for host in self.topology.hosts}) == 1

    def optimizer_number(self, optimizer: object, process_set: ProcessSet) -> int:
        """From 0 on in each process set, in the order in which optimizers are first seen: when they
        are made, or first send something after a new `hvd.init()`."""
        number = self._optimizers.get(optimizer)
        if number is None:
            counted = process_set.process_set_id or 0
            number = self._optimizers[optimizer] = self._numbered[counted]
            self._numbered[counted] += 1
        return number

    # Process sets

    def ranks_of(self, process_set: ProcessSet) -> list[int]:
        number = process_set.process_set_id
        if number == 0:
            return list(range(self.size))
        if number is None or number not in self._sets:
            raise UserError(
                f"{process_set} is not known. Add it with hvd.add_process_set() on all ranks."
            )
        ranks = self._sets[number].ranks
        assert ranks is not None
        return ranks

    def set_numbered(self, number: int) -> ProcessSet:
        """The process set that was added under this number."""
        if number not in self._sets:
            known = ", ".join(map(str, self._sets)) or "none but 0"
            raise UserError(f"there is no process set {number}. Added so far: {known}.")
        return self._sets[number]

    def engine(self, process_set: ProcessSet) -> Engine:
        """The one that serves the set. Raises where this rank is not in it."""
        number = process_set.process_set_id
        engine = self._engines.get(0 if number is None else number)
        if number is None or engine is None:
            ranks = self.ranks_of(process_set)
            raise UserError(f"rank {self.rank} is not in the process set of ranks {ranks}.")
        return engine

    def place_in(self, process_set: ProcessSet, rank: int, what: str) -> int:
        """A rank's place in a set."""
        ranks = self.ranks_of(process_set)
        if rank not in ranks:
            raise UserError(f"{what} {rank} is not among the ranks {ranks}.")
        return ranks.index(rank)

    def size_of(self, process_set: ProcessSet) -> int:
        return len(self.ranks_of(process_set))

    def add_set(self, given: ProcessSet | Sequence[int]) -> ProcessSet:
        """All ranks call it, with the same ranks."""
        process_set = as_process_set(given)
        if process_set.process_set_id is not None:
            raise UserError(f"{process_set} has been added before.")
        ranks = process_set.ranks
        assert ranks is not None
        if ranks[0] < 0 or ranks[-1] >= self.size:
            raise UserError(f"a process set of {ranks}: there are ranks 0 to {self.size - 1}.")
        if any(known.ranks == ranks for known in self._sets.values()) or (len(ranks) == self.size):
            raise UserError(f"there is a process set of the ranks {ranks} already.")
        world = self._engines[0]

        def make() -> None:
            number = self._next_set
            self._next_set += 1
            if self.rank in ranks:
                gpus = self._gpus.of(f"set-{number}") if self._gpus is not None else None
                group = world.group.subgroup(ranks)
                self._engines[number] = Engine(group, self.settings, gpus, names=ranks)
            process_set.process_set_id = number
            self._sets[number] = process_set

        self._perform(ADD_SET, f"process_set.add.{ranks}", ranks, make)
        return process_set

    def remove_set(self, process_set: ProcessSet) -> bool:
        """All ranks call it. Says whether there was such a set."""
        number = process_set.process_set_id
        if number is None or number == 0 or number not in self._sets:
            return False
        ranks = self.ranks_of(process_set)
        self._perform(REMOVE_SET, f"process_set.remove.{ranks}", ranks, lambda: None)
        engine = self._engines.pop(number, None)
        if engine is not None:
            engine.close("removed the process set")
        del self._sets[number]
        process_set.invalidate()
        return True

    def _leave_sets(self, reason: str) -> None:
        """All ranks together have ended, and so do the sets: also those without the rank that left,
        whose members hear of it here."""
        for number, engine in list(self._engines.items()):
            if number != 0:
                engine.leave(f"heard that {reason}")

    def _perform(
        self, kind: str, name: str, ranks: Sequence[int], make: Callable[[], None]
    ) -> None:
        work = Work(Request(name, kind, splits=tuple(ranks)), [])
        work.perform = make
        world = self._engines[0]
        world.submit(work, quiet=True)
        world.wait(work)

    # The timeline

    def start_timeline(self, target: Path, mark_cycles: bool) -> None:
        if self._timeline is not None and self._timeline.target == target.absolute():
            return  # as in Horovod: it goes on
        self.stop_timeline()  # and a new one takes the place of one that is recorded
        self._timeline = HorovodTimeline(
            target,
            list(self._engines.values()),
            host=self.topology.host(self.rank).name,
            mark_cycles=mark_cycles,
            clock=self._clock,
        )

    def stop_timeline(self) -> None:
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.stop()

    def close(self, reason: str) -> None:
        """The process sets go first, and all engines before anything that may take its time or
        fail: ranks that wait for this one hear of it at once."""
        with ExitStack() as last_first:
            last_first.callback(self.stop_timeline)
            for process_set in self._sets.values():
                last_first.callback(process_set.invalidate)
            for _, engine in sorted(self._engines.items()):
                last_first.callback(engine.close, reason)


class Holder:
    """The session that is meant, and what outlives it."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._connection = JobConnection()
        self._pid: int | None = None  # of the process that has begun

    def begin(self, process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
        settings = Settings.from_environ(os.environ)
        set_level(os.environ)
        assignment, group, gpus = self._connection.group(settings.timeout)
        if self._pid is None:
            self._pid = os.getpid()
            if assignment.launcher == "farandole":
                record_joined()
                record_uncaught()
                end_with_launcher(os.environ)
            share_cores(assignment, os.environ)
            atexit.register(self._leave)
        require_same_frameworks(group)
        name = os.environ.get("HOROVOD_HOSTNAME") or group.topology.host(group.rank).name
        topology = Topology.from_names(group.transport.share(name))
        several = len(group.topology.hosts) > 1
        clock = offset_over_group(group) if several else None
        self.start(Session(assignment, group, topology, settings, clock, gpus), process_sets)

    def start(
        self, session: Session, process_sets: Sequence[ProcessSet | Sequence[int]] = ()
    ) -> None:
        self.session = session
        LOGGER.info(
            "rank %d of %d has begun, over %s on %s",
            session.rank,
            session.size,
            session.transport,
            session.topology,
        )
        try:
            if session.settings.timeline is not None:
                session.start_timeline(session.settings.timeline, session.settings.mark_cycles)
            for process_set in process_sets:
                session.add_set(process_set)
        except BaseException:
            self.end("could not begin")
            raise

    def end(self, reason: str = "has called hvd.shutdown()") -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close(reason)
            LOGGER.info("rank %d of %d %s", session.rank, session.size, reason)

    def _leave(self) -> None:
        """When the script ends."""
        if self.session is not None and os.getpid() == self._pid:  # not one that it forked off
            record_leaving()
            self.end("has ended")


_PROCESS: Final = Holder()
_THREAD: Final = threading.local()


def holder() -> Holder:
    return getattr(_THREAD, "holder", _PROCESS)


def hold_here(own: Holder | None) -> None:
    """For the in-process world: from now on this thread is a rank of its own, or not any more."""
    if own is None:
        del _THREAD.holder
    else:
        _THREAD.holder = own


def current() -> Session:
    session = holder().session
    if session is None:
        raise NotInitialisedError
    return session


take_sessions_from(current)

__all__ = ["Holder", "Session", "current", "hold_here", "holder"]

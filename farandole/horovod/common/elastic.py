"""Training that survives a change of workers: state that is kept, and the loop around it.

    sync          everyone gets rank 0's state
    func(state)   the user's training, with a commit now and then
      a worker died             HorovodInternalError     back to the last commit
      hosts came or went        HostsUpdatedInterrupt    go on from here
    reset         hvd.shutdown(), hvd.init(): a new generation of workers, with new ranks
    on_reset      the user's callbacks, for what depends on the number of workers; and again

Under another launcher nobody takes a dead worker's place. There the error goes to the user, with
the state as it was at the last commit.
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import time
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, TypeVar

from farandole.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from farandole.worker import elastic as rejoining

Result = TypeVar("Result")


class HostUpdateResult(IntFlag):
    """What has happened to the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What all workers have in common, and can go back to. The base of such classes.

    `bcast_object` gives everyone rank 0's object, `get_rank` says who this is.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._from_rank_0 = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._reset_callbacks: list[Callable[[], object]] = []
        self._changes: rejoining.HostChanges | None = None

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """To be called after each reset: say, to scale the learning rate by the new size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._host_messages = queue.Queue()  # they were about an earlier generation
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes that hosts have changed; the next commit tells all. Only rank 0's counts."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and then lets workers come or go, if there are such.

        All ranks call it at the same step. What it costs is a copy of the state in memory, so
        commit often enough that little is lost, and seldom enough that little is copied.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises `HostsUpdatedInterrupt` on all ranks, or on none. All call it at the same step."""
        update = HostUpdateResult.no_update
        if self._rank() == 0:
            self._ask_launcher()
            while not self._host_messages.empty():
                update |= self._host_messages.get()[1]
        agreed = self._from_rank_0(int(update))
        if agreed:
            raise HostsUpdatedInterrupt(skip_sync=agreed == HostUpdateResult.removed)

    def _ask_launcher(self) -> None:
        if not rejoining.is_elastic(os.environ):
            return
        if self._changes is None:
            self._changes = rejoining.HostChanges(os.environ)
        change = self._changes.since(rejoining.generation(os.environ))
        if change is not None:
            self.on_hosts_updated(time.time(), HostUpdateResult[change])

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives everyone rank 0's state, and saves it."""
        raise NotImplementedError

    def regroup(self) -> None:
        """In the place of `sync` where workers only left: all have the state already."""

    def reset(self) -> None:
        """After workers have changed, before the callbacks."""


class ObjectState(State):
    """Any values by name, as attributes: `ObjectState(…, epoch=0, batch=0)`."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = dict(kwargs)
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        values = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state = copy.deepcopy(values)

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            # As things are now, not as they were at the last commit: the rest of the state, such
            # as a model, is sent as it is now, too.
            ObjectState.save(self)
            self._saved_state = self._from_rank_0(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)


def run_fn(
    func: Callable[..., Result],
    reset: Callable[[], None],
    anyone: Callable[[bool], bool] = lambda wanted: wanted,
) -> Callable[..., Result]:
    """`func(state, …)` as it is run under a change of workers; see the module.

    `reset` leaves one generation of workers and joins the next. `anyone` says whether any rank
    passes True to it: some may know only that workers left, while one that came needs the state.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        wants_sync = True
        while True:
            try:
                if anyone(wants_sync):
                    state.sync()
                else:
                    state.regroup()
                if rejoining.is_elastic(os.environ):
                    rejoining.note_state(os.environ)
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                if not rejoining.is_elastic(os.environ):
                    raise
                wants_sync = True
            except HostsUpdatedInterrupt as interrupt:
                wants_sync = not interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper

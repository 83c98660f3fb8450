"""Agrees on the step after which all ranks stop.

A signal reaches ranks at different steps, or reaches only one of them. If each stopped where it
hears of it, those that are a step further would wait for the others in a collective.

Ranks count the places at which they can stop (between two steps) alike. After a request to stop
each rank announces, in every such place, the next one that it will come to, and goes on. When all
have announced one, the largest is where everybody stops: nobody has passed it yet, because whoever
goes on announces that first.

              place 7       place 8       place 9
    rank 0    announces 8   decided: 9    stops
    rank 1    .. request .. announces 9   stops       last of the two: decides on 9

All of that happens in one key of a store, changed by compare-and-set, and only after a request.
Before one, a step costs a look at a flag: another thread asks the store a few times a second.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod

import torch
from torch.distributed import Store

from farandole.comm import Group

_REQUEST, _PLAN = "farandole-stop/request", "farandole-stop/plan"
_TRIES = 10_000
_MEETING_SECONDS = 1.0


class StopAgreement(ABC):
    """One rank's part in the agreement."""

    always_asks: bool = False
    """`stops_at` must be called in every place, not only after a request."""

    @abstractmethod
    def request(self, number: int) -> None:
        """This rank has got the signal `number`. Called by another thread than the main one."""

    @abstractmethod
    def requested(self) -> int | None:
        """The signal that any rank has got first. Called by another thread."""

    @abstractmethod
    def stops_at(self, place: int) -> int | None:
        """The signal, if all ranks stop in this place. Called in all places, by the main thread."""


class AloneAgreement(StopAgreement):
    """For a job of one rank."""

    def __init__(self) -> None:
        self._number: int | None = None

    def request(self, number: int) -> None:
        if self._number is None:
            self._number = number

    def requested(self) -> int | None:
        return self._number

    def stops_at(self, place: int) -> int | None:
        return self._number


class StoreAgreement(StopAgreement):
    """Through a store, as described above.

    `patience_seconds`: where the job goes on without ranks that have died, those that announce
    nothing for so long are not waited for. Everything raises what the store raises when it is gone.
    """

    def __init__(
        self, store: Store, rank: int, size: int, patience_seconds: float | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience_seconds = patience_seconds
        self._asked_at: float | None = None

    def request(self, number: int) -> None:
        self._store.compare_set(_REQUEST, "", str(number))  # the first one stays

    def requested(self) -> int | None:
        return int(self._store.get(_REQUEST)) if self._store.check([_REQUEST]) else None

    def stops_at(self, place: int) -> int | None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        known = ""
        for _ in range(_TRIES):
            plan = json.loads(known) if known else {}
            if "last" in plan:  # decided, and never changed again
                return self.requested() if place >= plan["last"] else None
            # Announcing place + 1 promises that this rank has not passed it. Invariant: the largest
            # announcement is at least one place ahead of every rank that has announced.
            ranks = sorted({*plan.get("ranks", ()), self._rank})
            furthest = max(plan.get("next", 0), place + 1)
            decided = len(ranks) == self._size or self._is_out_of_patience()
            plan = {"ranks": ranks, "next": furthest} | ({"last": furthest} if decided else {})
            wanted = json.dumps(plan)
            found = self._store.compare_set(_PLAN, known, wanted).decode()
            if found == wanted:
                return None
            known = found  # another rank's
        return None  # in the next place, then

    def _is_out_of_patience(self) -> bool:
        assert self._asked_at is not None
        waited = time.monotonic() - self._asked_at
        return self._patience_seconds is not None and waited > self._patience_seconds


class MeetingAgreement(StopAgreement):
    """Without a store: the ranks meet about once a second, and stop where they find a request.

    The time between two places is agreed on at each meeting, and with it the next one.
    """

    always_asks = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number: int | None = None
        self._next = 1
        self._met: tuple[int, float] | None = None

    def request(self, number: int) -> None:
        if self._number is None:
            self._number = number

    def requested(self) -> int | None:
        return self._number

    def stops_at(self, place: int) -> int | None:
        if place < self._next:
            return None
        seconds = 0.0
        if self._met is not None:
            seconds = (time.monotonic() - self._met[1]) / max(1, place - self._met[0])
        mine = torch.tensor([float(self._number or 0), seconds], dtype=torch.float64)
        number, slowest = self._group.all_reduce(mine, "max").tolist()
        self._met = (place, time.monotonic())
        if number:
            self._number = int(number)
            return self._number
        # By the slowest rank's time, which all have heard: so all meet again in the same place.
        rest = _MEETING_SECONDS / slowest if slowest > 0 else 1.0
        self._next = place + max(1, int(min(rest, 1e6)))
        return None

"""Adding a transport: a class that can `exchange` has every collective, and is found by name."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch

from farandole.comm import TRANSPORTS, Exchange, Group, InProcess, Transport, check_transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.errors import UserError
from farandole.testing.conformance import CHECKS, run_checks
from farandole.worker.join import choose_transport

TIMEOUT = timedelta(seconds=100)


class Mailboxes(Transport):
    """Between threads: a queue for every two ranks."""

    name = "mailboxes"
    never_waits = True

    def __init__(self, boxes: Any, rank: int, size: int, name: tuple[Any, ...] = ()) -> None:
        super().__init__(rank, size, TIMEOUT)
        self._boxes = boxes
        self._name = name
        self._subgroups: Counter[tuple[int, ...]] = Counter()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, data in sends:
            self._boxes[self._name, self.rank, peer].put(data.clone())
        for peer, into in receives:
            try:
                into.copy_(
                    self._boxes[self._name, peer, self.rank].get(timeout=TIMEOUT.total_seconds())
                )
            except queue.Empty:
                raise PeerLost.late([peer], TIMEOUT.total_seconds()) from None

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """With boxes of its own: messages of two groups must not mix."""
        self._subgroups[tuple(ranks)] += 1
        name = (*self._name, tuple(ranks), self._subgroups[tuple(ranks)])
        return Mailboxes(self._boxes, list(ranks).index(self.rank), len(ranks), name)


def on_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        found[rank] = body(rank)

    threads = [Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(rank) for rank in range(size)]


@pytest.fixture
def boxes() -> Any:
    return defaultdict(queue.SimpleQueue)


@pytest.fixture
def registered(boxes: Any) -> Iterator[str]:
    TRANSPORTS.register("mailboxes", lambda world: Mailboxes(boxes, world.rank, world.size))
    yield "mailboxes"
    TRANSPORTS.remove("mailboxes")


@pytest.mark.parametrize("size", [2, 3])
def test_it_does_all_that_a_group_needs(boxes: Any, size: int) -> None:
    assert CHECKS
    found = on_threads(size, lambda rank: run_checks(Group(Mailboxes(boxes, rank, size))))
    assert found == [[]] * size


def test_a_job_may_ask_for_it(registered: str) -> None:
    assert check_transport(registered) == registered
    exchange = Exchange(2, TIMEOUT)

    def connect(rank: int) -> tuple[str, float]:
        world: Any = InProcess(exchange, rank)
        chosen = choose_transport(world, torch.device("cpu"), registered)
        return chosen.name, float(Group(chosen).all_reduce(torch.ones(1)))

    assert on_threads(2, connect) == [("mailboxes", 2.0)] * 2


def test_it_is_unknown_before_and_after() -> None:
    with pytest.raises(UserError, match="no transport 'mailboxes'"):
        check_transport("mailboxes")

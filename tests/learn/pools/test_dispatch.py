"""Who gets which piece: slow workers, lost ones, silent ones. Workers are threads that wait for
events, so that nothing depends on time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from farandole.learn.pools.dispatch import Dispatcher
from farandole.learn.pools.workers import LostPoolError, Workers
from farandole.learn.sums.tree import Branch

PATIENCE = 200.0
PIECES = [(number, number + 1) for number in range(12)]


class KilledError(Exception):
    pass


class Scripted(Workers):
    """`behave(worker, piece, turn)` is what a worker does before it answers."""

    def __init__(
        self, count: int, behave: Callable[[str, int, int], None], *, replaced: bool = True
    ) -> None:
        self.living = [f"w{number}" for number in range(count)]
        self.vanished: set[str] = set()
        self.started: Counter[tuple[str, int]] = Counter()
        self._behave = behave
        self._replaced = replaced

    def names(self) -> Sequence[str]:
        return self.living

    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Any]:
        self.started[worker, branch[0]] += 1
        future: Future[Any] = Future()

        def work() -> None:
            try:
                self._behave(worker, branch[0], shared)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result({"found": np.array(branch[0] * 10 + shared)})

        threading.Thread(target=work, daemon=True).start()
        return future

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, KilledError)

    def lost(self, worker: str) -> None:
        self.living.remove(worker)
        if self._replaced:
            self.living.append(f"{worker}'")

    def gone(self, workers: Collection[str]) -> Collection[str]:
        return [worker for worker in workers if worker in self.vanished]


def run(workers: Workers, shared: int = 0, **options: Any) -> tuple[list[int], Dispatcher]:
    dispatcher = Dispatcher(workers, **{"backups": True, "timeout": PATIENCE} | options)
    return values(dispatcher, shared), dispatcher


def values(dispatcher: Dispatcher, shared: int = 0) -> list[int]:
    return [int(each["found"]) for each in dispatcher.run(PIECES, shared)]


def expected(shared: int = 0) -> list[int]:
    return [piece * 10 + shared for piece in range(len(PIECES))]


def test_a_stopped_worker_is_overtaken_and_goes_on_later() -> None:
    resumed = threading.Event()

    def behave(worker: str, piece: int, turn: int) -> None:
        if worker == "w1" and turn == 0:
            resumed.wait(PATIENCE)

    workers = Scripted(3, behave)
    found, dispatcher = run(workers)
    assert found == expected()
    assert dispatcher.backups >= 1
    assert sum(count for (worker, _), count in workers.started.items() if worker == "w1") == 1
    # It still holds its piece of the first pass; the second goes without it, and its late answer
    # counts nowhere.
    assert values(dispatcher, 1) == expected(1)
    resumed.set()
    assert values(dispatcher, 2) == expected(2)


def test_without_backups_everybody_waits() -> None:
    slow = threading.Event()
    begun = threading.Event()

    def behave(worker: str, piece: int, turn: int) -> None:
        if worker == "w1" and not slow.is_set():
            begun.set()
            slow.wait(PATIENCE)

    workers = Scripted(2, behave)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(run(workers, backups=False)))
    thread.start()
    assert begun.wait(PATIENCE)
    thread.join(3 * 0.05)
    assert thread.is_alive()
    slow.set()
    thread.join(PATIENCE)
    found, dispatcher = result[0]
    assert found == expected()
    assert dispatcher.backups == 0
    assert set(workers.started.values()) == {1}


def test_each_worker_gets_its_own_pieces_first_in_every_pass() -> None:
    barrier = threading.Barrier(3)

    def behave(worker: str, piece: int, turn: int) -> None:
        barrier.wait(PATIENCE)  # all at the same pace

    workers = Scripted(3, behave)
    _, dispatcher = run(workers, backups=False)
    values(dispatcher)
    for number in range(3):
        own = {piece for (worker, piece) in workers.started if worker == f"w{number}"}
        assert own == set(range(4 * number, 4 * number + 4))


def test_pieces_of_lost_workers_are_computed_by_others() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        if worker in ("w0", "w2"):
            raise KilledError

    found, dispatcher = run(Scripted(4, behave, replaced=False))
    assert found == expected()
    assert dispatcher.losses == 2


def test_one_that_takes_the_place_of_a_lost_worker_is_used() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        if worker == "w0":
            raise KilledError

    workers = Scripted(1, behave)
    assert run(workers)[0] == expected()
    assert workers.living == ["w0'"]


def test_a_piece_that_ends_its_workers_is_named() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        if piece == 5:
            raise KilledError("signal 9")

    with pytest.raises(LostPoolError, match=r"3 workers were lost with chunks 5 to 5.*signal 9"):
        run(Scripted(4, behave))


def test_all_lost() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        raise KilledError("signal 9")

    with pytest.raises(LostPoolError, match=r"all workers of the pool are lost.*w.: signal 9"):
        run(Scripted(2, behave, replaced=False))
    with pytest.raises(LostPoolError, match="has no workers"):
        run(Scripted(0, behave))


def test_one_that_vanishes_without_a_word() -> None:
    workers = Scripted(2, lambda worker, piece, turn: None, replaced=False)
    workers.vanished.add("w1")

    def behave(worker: str, piece: int, turn: int) -> None:
        if worker == "w1":
            threading.Event().wait(PATIENCE)

    workers._behave = behave
    found, dispatcher = run(workers, backups=False)
    assert found == expected()
    assert dispatcher.losses == 1


def test_silence_ends_with_the_names_of_those_who_are_silent() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        threading.Event().wait(PATIENCE)

    with pytest.raises(LostPoolError, match=r"for 0.01 s. Waited for: w0 \(chunks 0 to 0\), w1 \("):
        run(Scripted(2, behave), timeout=0.01)


def test_what_a_task_raises_comes_back() -> None:
    def behave(worker: str, piece: int, turn: int) -> None:
        if piece == 7 and turn == 0:
            raise ZeroDivisionError("in piece 7")

    workers = Scripted(2, behave)
    dispatcher = Dispatcher(workers, backups=True, timeout=PATIENCE)
    with pytest.raises(ZeroDivisionError, match="in piece 7"):
        dispatcher.run(PIECES, 0)
    assert values(dispatcher, 1) == expected(1)

"""Hands the pieces of a pass to workers: each takes one when it is done with the last.

    worker a   ├ 0 ┤├ 1 ┤├ 2 ┤├ 6 ┤
    worker b   ├────────── 3 ──────────…      slow, stopped, or about to be lost
    worker c   ├ 5 ┤├ 7 ┤├ 4 ┤├ 3 ┤           when nothing is left, the slowest is given out again

There are more pieces than workers. Every pass gives a worker the same pieces first, which it may
still have in memory, and then those of the worker that has most left. The first answer for a piece
counts; both are the same bits. A piece whose worker is lost is given to another. `pace` says who
is slow.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from statistics import median
from typing import Any

from farandole.learn.pools.pace import SLOW, Paces
from farandole.learn.pools.workers import LostPoolError, Workers
from farandole.learn.sums.sum import Statistics
from farandole.learn.sums.tree import Branch

_LOSSES = 3  # of one piece: then it is the piece that ends its workers
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class _Task:
    worker: str
    piece: int
    turn: int  # the pass that it belongs to
    since: float


class Dispatcher:
    """Counts what happens in `backups` and `losses`.

    `timeout`: so long may everybody be silent, in seconds.
    """

    def __init__(self, workers: Workers, *, backups: bool, timeout: float) -> None:
        self._workers = workers
        self._use_backups = backups
        self._timeout = timeout
        self._running: dict[Future[Statistics], _Task] = {}  # of earlier passes too
        self._turn = 0
        self._paces = Paces()
        self.backups = 0
        self.losses = 0

    def run(
        self,
        pieces: Sequence[Branch],
        shared: Any,
        on_piece: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Statistics]:
        """The statistics of each piece.

        Raises what a task has raised, and `LostPoolError` when there are no workers left, when
        nobody answers, or when a piece has cost three workers.
        """
        self._turn += 1
        turn = _Pass(pieces, shared)
        turn.deal(self._workers.names())
        if not turn.waiting:
            raise LostPoolError("the pool has no workers.")
        heard = time.monotonic()
        try:
            while len(turn.found) < len(pieces):
                self._hand_out(turn)
                finished, _ = wait(self._running, self._pause(turn), FIRST_COMPLETED)
                for future in finished:
                    heard = time.monotonic()
                    self._take(turn, future)
                if not finished:
                    self._look(turn)
                on_piece(len(turn.found), len(pieces))
                if time.monotonic() - heard > self._timeout:
                    raise LostPoolError(self._silence(pieces))
        finally:
            self._note_late(turn)
            for future in self._running:
                self._workers.abandon(future)
        return [turn.found[piece] for piece in range(len(pieces))]

    def _hand_out(self, turn: _Pass) -> None:
        busy = {task.worker for task in self._running.values()}
        for worker in [name for name in turn.waiting if name not in busy]:
            piece = None if self._leaves_it(turn, worker) else turn.next_for(worker)
            if piece is None:
                piece = self._slowest(turn, worker)
                if piece is None:
                    continue
                self.backups += 1
            task = _Task(worker, piece, self._turn, time.monotonic())
            try:
                future = self._workers.start(worker, turn.shared, turn.pieces[piece])
            except Exception as error:
                if not self._workers.is_loss(error):
                    raise
                self._lose(turn, task, error)
            else:
                self._running[future] = task

    def _leaves_it(self, turn: _Pass, worker: str) -> bool:
        """Whether what is left is better done by the others, who are at work and not late."""
        if not self._use_backups or not turn.seconds:
            return False
        typical, now = median(turn.seconds), time.monotonic()
        others = {
            task.worker
            for task in self._of_this_pass(turn)
            if now - task.since < SLOW * self._paces.of(task.worker) * typical
        }
        return self._paces.leaves(worker, others - {worker}, turn.left)

    def _slowest(self, turn: _Pass, worker: str) -> int | None:
        """The piece that is late, or that its worker will be late with, and that nobody else has
        begun too."""
        if not self._use_backups or not turn.seconds:
            return None
        typical, now = median(turn.seconds), time.monotonic()
        running = self._of_this_pass(turn)
        copies = Counter(task.piece for task in running)
        alone = [task for task in running if copies[task.piece] == 1]
        if not alone:
            return None
        oldest = min(alone, key=lambda task: task.since)
        if now - oldest.since >= SLOW * typical:
            return oldest.piece
        last = max(alone, key=lambda task: task.since + self._paces.of(task.worker) * typical)
        sooner = self._paces.would_overtake(worker, last.worker, now - last.since, typical)
        return last.piece if sooner else None

    def _of_this_pass(self, turn: _Pass) -> list[_Task]:
        """Those whose pieces have no answer yet."""
        tasks = self._running.values()
        return [task for task in tasks if task.turn == self._turn and task.piece not in turn.found]

    def _pause(self, turn: _Pass) -> float:
        """Until it may be time for another backup."""
        if not self._use_backups or not turn.seconds:
            return _LOOK_SECONDS
        slow = SLOW * median(turn.seconds)
        copies = Counter(task.piece for task in self._of_this_pass(turn))
        left = [
            task.since + slow - time.monotonic()
            for task in self._of_this_pass(turn)
            if copies[task.piece] == 1
        ]
        idle = len(turn.waiting) > len({task.worker for task in self._running.values()})
        return min([_LOOK_SECONDS, *(max(0.001, each) for each in left)]) if idle else _LOOK_SECONDS

    def _take(self, turn: _Pass, future: Future[Statistics]) -> None:
        task = self._running.pop(future)
        current = task.turn == self._turn
        error = None if future.cancelled() else future.exception()
        if error is not None and self._workers.is_loss(error):
            self._lose(turn, task, error)
        elif not current or task.piece in turn.found:
            return  # somebody else was faster; what it answers, or what failed in it, is over
        elif error is not None:
            raise self._workers.cause(error)
        else:
            turn.found[task.piece] = future.result()
            seconds = time.monotonic() - task.since
            turn.seconds.append(seconds)
            self._paces.note(task.worker, seconds, median(turn.seconds))

    def _note_late(self, turn: _Pass) -> None:
        """Those whose pieces somebody else has answered, or nobody."""
        for task in self._running.values():
            if task.turn == self._turn and turn.seconds:
                seconds = time.monotonic() - task.since
                self._paces.note_at_least(task.worker, seconds, median(turn.seconds))

    def _look(self, turn: _Pass) -> None:
        """For workers that were lost without a word."""
        lost = set(self._workers.gone({task.worker for task in self._running.values()}))
        for future, task in list(self._running.items()):
            if task.worker in lost:
                del self._running[future]
                self._lose(turn, task, LostPoolError("it is not part of the pool any more."))

    def _lose(self, turn: _Pass, task: _Task, error: BaseException) -> None:
        if not self._workers.lost_elsewhere(task.worker, error):
            self.losses += 1
            self._paces.forget(task.worker)
            self._workers.lost(task.worker)
        turn.deal(self._workers.names())
        if task.turn != self._turn or task.piece in turn.found:
            return
        turn.losses[task.piece] += 1
        why = str(error).strip().splitlines() or [type(error).__name__]
        if turn.losses[task.piece] >= _LOSSES:
            first, end = turn.pieces[task.piece]
            raise LostPoolError(
                f"{_LOSSES} workers were lost with chunks {first} to {end - 1}, the last one was "
                f"{task.worker}: {why[0]} Were they killed, or out of memory?"
            ) from error
        if not turn.waiting:
            raise LostPoolError(
                f"all workers of the pool are lost, the last one was {task.worker}: {why[0]}"
            ) from error
        if all(other.piece != task.piece for other in self._of_this_pass(turn)):
            turn.again.append(task.piece)

    def _silence(self, pieces: Sequence[Branch]) -> str:
        waited = [
            f"{task.worker} (chunks {pieces[task.piece][0]} to {pieces[task.piece][1] - 1})"
            for task in self._running.values()
            if task.turn == self._turn
        ]
        stuck = [task.worker for task in self._running.values() if task.turn != self._turn]
        text = f"no worker has answered for {self._timeout:g} s. Waited for: {', '.join(waited)}."
        return text + (f" Still at an earlier pass: {', '.join(stuck)}." if stuck else "")


class _Pass:
    """What is left to do in one pass, and what has been found."""

    def __init__(self, pieces: Sequence[Branch], shared: Any) -> None:
        self.pieces = pieces
        self.shared = shared
        self.waiting: dict[str, deque[int]] = {}  # what each living worker would do next
        self.again: deque[int] = deque()  # pieces whose workers were lost
        self.found: dict[int, Statistics] = {}
        self.seconds: list[float] = []  # of pieces that are done
        self.losses: Counter[int] = Counter()

    @property
    def left(self) -> int:
        """Pieces that nobody has begun."""
        return len(self.again) + sum(map(len, self.waiting.values()))

    def deal(self, names: Sequence[str]) -> None:
        """To those who live now. At first by the number of workers, later what is left."""
        before, self.waiting = self.waiting, {name: deque() for name in names}
        if not before:
            for piece in range(len(self.pieces) if names else 0):
                self.waiting[names[piece * len(names) // len(self.pieces)]].append(piece)
            return
        for name, left in before.items():
            if name in self.waiting:
                self.waiting[name] = left
            else:
                self.again.extend(left)

    def next_for(self, worker: str) -> int | None:
        """Its own first, then of the one that has most left."""
        if self.again:
            return self.again.popleft()
        own = self.waiting[worker]
        if own:
            return own.popleft()
        most = max(self.waiting.values(), key=len)
        return most.pop() if most else None

"""The launcher's side of an elastic job's rendezvous: who asks for a rank, and what it is told.

`farandole.worker.elastic` is the other side, and defines the keys and values between them. The
store keeps everything, so a worker may ask before anyone looks, and read the answer later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from farandole.launch.policies.elastic.generations import GenerationPlacement
from farandole.worker.elastic import (
    LEAVE,
    PREFIX,
    WITHOUT_STATE,
    Change,
    lost_key,
    straggler_key,
)
from farandole.worker.store.client import Prefixed
from farandole.worker.store.job_store import JobStore

_STORE_TIMEOUT = timedelta(seconds=60)
_NOTHING_YET = -2  # before -1, with which a new worker asks


class RendezvousServer:
    """Writes and reads in the job's store."""

    def __init__(self, store: JobStore) -> None:
        self._store = Prefixed(PREFIX, store.client(_STORE_TIMEOUT))
        self._answered: dict[int, int] = {}  # the last question of each worker that has its answer
        self.beat()

    def beat(self) -> None:
        """Call it often: shows that the launcher lives."""
        self._store.add("pulse", 1)

    def expect(self, worker: int) -> None:
        """Call it before `worker` starts."""
        self._store.set(f"asks/{worker}", f"{_NOTHING_YET} {WITHOUT_STATE} 0")
        self._answered[worker] = _NOTHING_YET

    def asking(self, workers: Iterable[int]) -> dict[int, Question]:
        """Which of these workers wait for a rank, and what they say of themselves."""
        numbers = list(workers)
        if not numbers:
            return {}
        asked = self._store.multi_get([f"asks/{worker}" for worker in numbers])
        questions = {
            worker: _read(question) for worker, question in zip(numbers, asked, strict=True)
        }
        return {
            worker: question
            for worker, question in questions.items()
            if question.number > self._answered[worker]
        }

    def dismiss(self, worker: int) -> None:
        """Tells a worker that asks that there is no rank for it."""
        self._answer(worker, LEAVE)

    def assign(
        self,
        generation: int,
        placements: Sequence[GenerationPlacement],
        *,
        admits: bool = False,
        life: int = 0,
    ) -> None:
        """Tells all of a generation, who all ask, their ranks. `admits`: some of them are new."""
        members = [placement.worker for placement in placements]
        for placement in placements:
            answer = {**_ranks(generation, placement), "members": members}
            self._answer(placement.worker, json.dumps({**answer, "admits": admits, "life": life}))

    def promise(self, generation: int, placement: GenerationPlacement, life: int) -> None:
        """Tells a new worker, which asks, a rank that it will have or nearly so."""
        answer = {**_ranks(generation, placement), "members": [], "admits": False, "life": life}
        self._answer(placement.worker, json.dumps({**answer, "is_promise": True}))

    def tell_lost(self, generation: int) -> None:
        """Those of `generation` need not wait for all of it."""
        self._store.set(lost_key(generation), "1")

    def straggler(self, generation: int) -> int | None:
        """The worker that holds up `generation`, as its rank 0 says."""
        key = straggler_key(generation)
        return int(self._store.get(key)) if self._store.check([key]) else None

    def announce(self, generation: int, change: Change) -> None:
        """For those of `generation`, when they next ask."""
        self._store.set(f"change/{generation}", change)

    def has_committed(self, generation: int) -> bool:
        return self._store.check([f"committed/{generation}"])

    def _answer(self, worker: int, text: str) -> None:
        after = _read(self._store.get(f"asks/{worker}")).number
        self._store.set(f"answer/{worker}/{after}", text)
        # Remembered, so that the same question, which stays in the store, is not taken for a new
        # one.
        self._answered[worker] = after


class Question(NamedTuple):
    """What a worker that wants a rank says of itself."""

    number: int  # its questions are numbered, one way or another
    kind: str  # whether it has the state, and was interrupted
    step: int = 0  # that it was interrupted in

    @property
    def has_state(self) -> bool:
        return self.kind != WITHOUT_STATE


def _read(question: bytes) -> Question:
    number, kind, step = question.decode().split()
    return Question(int(number), kind, int(step))


def _ranks(generation: int, placement: GenerationPlacement) -> dict[str, int]:
    return {
        "generation": generation,
        "rank": placement.rank,
        "size": placement.size,
        "local_rank": placement.local_rank,
        "local_size": placement.local_size,
    }

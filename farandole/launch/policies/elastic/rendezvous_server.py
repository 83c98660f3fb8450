"""The launcher's side of an elastic job's rendezvous: who asks for a rank, and what it is told.

`farandole.worker.elastic` is the other side, and defines the keys and values between them. The
store keeps everything, so a worker may ask before anyone looks, and read the answer later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta

from farandole.launch.policies.elastic.generations import Placement
from farandole.worker.elastic import LEAVE, PREFIX, WITH_STATE, WITHOUT_STATE, Change
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
        self._store.set(f"asks/{worker}", f"{_NOTHING_YET} {WITHOUT_STATE}")
        self._answered[worker] = _NOTHING_YET

    def asking(self, workers: Iterable[int]) -> dict[int, bool]:
        """Which of these workers wait for a rank, and whether they have the training's state."""
        numbers = list(workers)
        if not numbers:
            return {}
        asked = self._store.multi_get([f"asks/{worker}" for worker in numbers])
        questions = {
            worker: _read(question) for worker, question in zip(numbers, asked, strict=True)
        }
        return {
            worker: has_state
            for worker, (after, has_state) in questions.items()
            if after > self._answered[worker]
        }

    def dismiss(self, worker: int) -> None:
        """Tells a worker that asks that there is no rank for it."""
        self._answer(worker, LEAVE)

    def assign(self, generation: int, placements: Sequence[Placement]) -> None:
        """Tells all of a generation, who all ask, their ranks."""
        for placement in placements:
            answer = {
                "generation": generation,
                "rank": placement.rank,
                "size": placement.size,
                "local_rank": placement.local_rank,
                "local_size": placement.local_size,
            }
            self._answer(placement.worker, json.dumps(answer))

    def announce(self, generation: int, change: Change) -> None:
        """For those of `generation`, when they next ask."""
        self._store.set(f"change/{generation}", change)

    def has_committed(self, generation: int) -> bool:
        return self._store.check([f"committed/{generation}"])

    def _answer(self, worker: int, text: str) -> None:
        after, _ = _read(self._store.get(f"asks/{worker}"))
        self._store.set(f"answer/{worker}/{after}", text)
        # Remembered, so that the same question, which stays in the store, is not taken for a new
        # one.
        self._answered[worker] = after


def _read(question: bytes) -> tuple[int, bool]:
    after, state = question.decode().split()
    return int(after), state == WITH_STATE

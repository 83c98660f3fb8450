"""The launcher's side of an elastic job: who asks for a seat, and what each is told.

`rejoining` has the other side and the words between them. The store keeps everything, so a worker
may ask before anyone looks, and read the answer when it comes to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta

from farandole.launch.policies.elastic.generations import Place
from farandole.worker.elastic import LEAVE, PREFIX, WITH_STATE, WITHOUT_STATE, Change
from farandole.worker.store.client import Prefixed
from farandole.worker.store.hosted import JobStore

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
        """Which of these workers wait for a seat, and whether they have the training's state."""
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
        """Tells a worker that asks that there is no seat for it."""
        self._answer(worker, LEAVE)

    def seat(self, generation: int, places: Sequence[Place]) -> None:
        """Tells all of a generation, who all ask, where they sit."""
        for place in places:
            seat = {
                "generation": generation,
                "rank": place.rank,
                "size": place.size,
                "local_rank": place.local_rank,
                "local_size": place.local_size,
            }
            self._answer(place.worker, json.dumps(seat))

    def announce(self, generation: int, change: Change) -> None:
        """For those of `generation`, when they next ask."""
        self._store.set(f"change/{generation}", change)

    def has_committed(self, generation: int) -> bool:
        return self._store.check([f"committed/{generation}"])

    def _answer(self, worker: int, text: str) -> None:
        after, _ = _read(self._store.get(f"asks/{worker}"))
        self._store.set(f"answer/{worker}/{after}", text)
        self._answered[worker] = after


def _read(question: bytes) -> tuple[int, bool]:
    after, state = question.decode().split()
    return int(after), state == WITH_STATE

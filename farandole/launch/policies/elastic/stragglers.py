"""Which worker rank 0 has found to be much slower than the others: each is named once."""

from __future__ import annotations

from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer

SLOW = "was three times slower than the median for a minute"


class Stragglers:
    """Of one job."""

    def __init__(self, rendezvous: RendezvousServer) -> None:
        self._rendezvous = rendezvous
        self._named: set[tuple[int, int]] = set()

    def new_one(self, generation: int) -> int | None:
        """The worker that holds up `generation`, if nobody has heard of it."""
        number = self._rendezvous.straggler(generation)
        if number is None or (generation, number) in self._named:
            return None
        self._named.add((generation, number))
        return number

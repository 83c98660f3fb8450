"""Workers that wait for one another, by way of the registrar: everyone gives, everyone gets all.

It is how a job under a parameter server adds up its numbers and stands at a barrier: whoever has
died is not waited for. A worker that was started again runs through the beginning of its script
once more; what was said there is kept, so that it hears what it would have heard.
"""

from __future__ import annotations

from collections.abc import Iterable

Given = dict[int, bytes]
"""What each rank gave."""


class Meetings:
    """A meeting is called `mark/number`, by all in the same order. The mark changes with the epoch;
    before the first it is empty."""

    def __init__(self) -> None:
        self._open: dict[str, Given] = {}
        self._over: dict[str, Given] = {}

    def give(self, name: str, rank: int, payload: bytes) -> Given | None:
        """Returns what was given to a meeting that is over already."""
        if name in self._over:
            return self._over[name]
        self._open.setdefault(name, {})[rank] = payload
        return None

    def complete(self, ranks: Iterable[int]) -> list[tuple[str, Given]]:
        """The meetings to which by now all of `ranks` have given, with what everyone gave."""
        present = set(ranks)
        over = [name for name, given in self._open.items() if present <= given.keys()]
        found = [(name, self._open.pop(name)) for name in over]
        # Kept, because a worker that died after giving may be started again and give once more: it
        # must get the same outcome as the others did.
        self._over.update(found)
        return found

    def missing(self, name: str, ranks: Iterable[int]) -> list[int]:
        return sorted(set(ranks) - self._open.get(name, {}).keys())

    def forget_all_but(self, mark: str) -> None:
        """Of those that are over: of this mark, and of the beginning."""
        self._over = {
            name: given
            for name, given in self._over.items()
            if name.rpartition("/")[0] in ("", mark)
        }

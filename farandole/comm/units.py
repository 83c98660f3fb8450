"""Collectives that outlive a rank: what its loss interrupts is repeated by those that are left.

A unit is one collective, or several that only make sense together, such as all buckets of a
backward pass. All ranks run the same units in the same order. A unit has two halves:

    work        the collectives themselves. Their results stay where they are: nobody uses them yet
    meeting     a small collective that a rank enters when its work is done

A rank that comes out of the meeting knows that all ranks had entered it, so the work of all is
done. When a rank is lost, the survivors form a new group and compare how far each has come:

    some are one unit ahead             they came out of the meeting, so the work of all was done:
                                        for those behind, the unit is over
    all in the same unit, work done     the unit is over
    all in the same unit, some are not  the results are thrown away, and all repeat the work from
                                        their own inputs, which `restore` brings back

Nobody can be further ahead than one unit: the next one needs everybody's part again. So the results
are the same on all survivors, and the contribution of the lost rank is in all of them or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

T = TypeVar("T")


class Recovery(Protocol):
    """Forms the group of the survivors, and compares how far they have come."""

    def recover(self, unit: int, *, is_done: bool, is_step: bool) -> bool:
        """This rank's unit has broken. Returns whether it is over, or else to be repeated."""

    def meet(self, *, after_step: bool) -> None:
        """The meeting at the end of a unit. After a step it says more than that all are there."""

    def unit_over(self, unit: int, *, is_step: bool) -> None:
        """All ranks have the results: if it was a step, the averages of its gradients."""


class Units:
    """Runs the units of one rank. `is_broken` says whether the group has lost a rank."""

    def __init__(self, recovery: Recovery, is_broken: Callable[[], bool]) -> None:
        self.number = 0  # of the unit under way, or else of the last one
        self.record: Callable[[object], None] | None = None
        """Called with the result of each unit that is no step."""
        self.rehearse: Callable[[torch.Tensor | None], Any] | None = None
        """In place of units, as long as this rank is not part of the group: what they returned to
        the others, which had the same units before."""
        self._recovery = recovery
        self._is_broken = is_broken
        self._inside = False

    def run(
        self,
        work: Callable[[], T],
        restore: Callable[[], None],
        changed: torch.Tensor | None = None,
    ) -> T:
        """What `work` returns. `restore` prepares for its repetition. In a unit, it is part of it.

        `changed` is the tensor that it overwrites and returns, if it does. Raises what `work`
        raises for any other reason than a lost rank.
        """
        if self._inside:
            return work()
        if self.rehearse is not None:
            return cast(T, self.rehearse(changed))
        result = self._run(work, restore, is_step=False)
        if self.record is not None:
            self.record(result)
        return result

    def run_step(self, work: Callable[[], None], restore: Callable[[], None]) -> None:
        """The same for the work that averages the gradients of a step."""
        if self.rehearse is None:
            self._run(work, restore, is_step=True)

    def _run(self, work: Callable[[], T], restore: Callable[[], None], *, is_step: bool) -> T:
        self.number += 1
        self._inside = True
        try:
            return self._until_over(work, restore, is_step=is_step)
        finally:
            self._inside = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, collectives are no units: they are not repeated, and raise if a rank is lost."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _until_over(
        self, work: Callable[[], T], restore: Callable[[], None], *, is_step: bool
    ) -> T:
        result: list[T] = []
        while True:
            try:
                if not result:
                    result.append(work())
                self._recovery.meet(after_step=is_step)
            except Exception:  # torch's futures turn a CommError into another error
                if not self._is_broken():
                    raise
                if not self._recovery.recover(self.number, is_done=bool(result), is_step=is_step):
                    result.clear()
                    restore()
                    continue
            else:
                self._recovery.unit_over(self.number, is_step=is_step)
            assert result
            return result[0]

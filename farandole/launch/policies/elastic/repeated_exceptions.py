"""Whether an exception that ended a worker would end its replacement too.

A sample that cannot be read, say, goes back when its worker has failed, is dealt to another one,
and ends that. A replacement for each would use up all restarts. A passing trouble of one worker,
such as a disk that did not answer, is another matter.
"""

from __future__ import annotations

from farandole.worker.failure import Failure, Kind

_SAME_STEPS = 2  # what a lost worker had read is dealt again in the next step, or the one after


class RepeatedExceptions:
    """Remembers each exception by its last line, and the step that its survivors finished."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[int, int]] = {}  # with the worker that raised it

    def is_repeated(self, failure: Failure, step: int) -> bool:
        """Whether another worker has raised the same, without progress between the two."""
        said = _exception(failure)
        if said is None:
            return False
        worker, before = self._steps.get(said, (failure.rank, step))
        self._steps[said] = failure.rank, step
        return worker != failure.rank and abs(step - before) <= _SAME_STEPS


def _exception(failure: Failure) -> str | None:
    """The last line of what a script raised by itself; None: it ended in another way."""
    own = failure.kind is Kind.OWN and failure.exit_code > 0
    if not own or "Traceback" not in failure.error:
        return None
    return failure.error.strip().splitlines()[-1]

"""Workers that have saved and left because a signal asked them to: that is no failure."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.worker.failure import Failure
from farandole.worker.signals import exit_code_of

_SIGNALS = ("SIGTERM", "SIGUSR1")


def left_by(failures: Sequence[Failure]) -> str | None:
    """The signal after which all of these have left by themselves; None: it was something else.

    Those that a signal has killed are told apart by their exit code, which is negative.
    """
    codes = {failure.exit_code for failure in failures}
    return next((name for name in _SIGNALS if codes == {exit_code_of(name)}), None)

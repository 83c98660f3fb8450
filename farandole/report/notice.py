"""Says early that a script has not logged the target's metric, while there is time to stop.

It is no error yet: a script may log its loss in every step and its accuracy once in five epochs.
That no lane will reach the target is certain when the first one has ended without it.
"""

from __future__ import annotations

from farandole.errors import nearest
from farandole.report.history import History
from farandole.report.target import Target


class TargetNotice:
    """Looks at what the lanes have logged so far; has something to say twice at most."""

    def __init__(self, target: Target | None) -> None:
        self._metric = None if target is None else target.metric
        self._told = False

    def look(self, history: History) -> str | None:
        """A line for the user, at the first log without the metric, or when it comes after all."""
        names = history.metric_names
        if self._metric is None or not names:
            return None
        if self._metric in names:
            metric, self._metric = self._metric, None  # the later lanes will log it too
            when = history.series(metric)[0].time_seconds
            return f"{metric} was logged after {when:.1f} s: all is well." if self._told else None
        if self._told:
            return None
        self._told = True
        return (
            f"warning: --target asks for {self._metric}, and the script has logged "
            f"{', '.join(names)}. {nearest(self._metric, names)} If {self._metric} is logged "
            "later, all is well; else press Ctrl-C and write what is logged."
        )

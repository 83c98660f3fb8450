"""What a run tells a launcher that may start its job again: its name, and what it can go on from.

Rank 0 keeps one record in the job's store, wherever it runs (`run_reporter`). The launcher reads it
when the job has ended, also when rank 0 was killed.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any, Final

KEY: Final = "farandole-run/report"


@dataclass(frozen=True)
class RunReport:
    """Steps and epochs are counted as `run.steps` and `run.epoch` are."""

    name: str  # of the run's folder
    steps: int = 0  # when it was last written: a second ago at most, and a step
    epoch: int = 0
    checkpoint: str | None = None  # the newest that the run has saved, or has gone on from
    checkpoint_steps: int = 0
    checkpoint_epoch: int = 0
    resumes: bool = False  # it looks for checkpoints in the place that it saves them to
    leaves_state: bool = False  # ranks write what they hold when another one is lost

    def after(self, earlier: RunReport | None) -> RunReport:
        """This one, of a later start of the same run. What it has not come to yet holds."""
        if earlier is None:
            return self
        known = replace(self, resumes=self.resumes or earlier.resumes)
        if self.checkpoint is not None:
            return known
        return replace(
            known,
            checkpoint=earlier.checkpoint,
            checkpoint_steps=earlier.checkpoint_steps,
            checkpoint_epoch=earlier.checkpoint_epoch,
        )

    def has_got_further(self, earlier: RunReport | None) -> bool:
        """Whether it has a checkpoint of a later step. Scripts that count no steps have 0."""
        if self.checkpoint is None or earlier is None or earlier.checkpoint is None:
            return self.checkpoint is not None
        is_other = self.checkpoint != earlier.checkpoint
        return is_other and (not self.steps or self.checkpoint_steps > earlier.checkpoint_steps)


def read_report(text: bytes | None) -> RunReport | None:
    """In the launcher. None where there is none, or something else in its place."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        found: dict[str, Any] = json.loads(text or b"")
        checkpoint = found["checkpoint"]
        return RunReport(
            name=str(found["name"]),
            steps=int(found["steps"]),
            epoch=int(found["epoch"]),
            checkpoint=None if checkpoint is None else str(checkpoint),
            checkpoint_steps=int(found["checkpoint_steps"]),
            checkpoint_epoch=int(found["checkpoint_epoch"]),
            resumes=found["resumes"] is True,
            leaves_state=found["leaves_state"] is True,
        )
    return None

"""`tune.json`: what a study has found so far, for `farandole watch`. It needs no optuna to be read.

The study's own file is what the study goes on from; this is a picture of it that is written whole
when a trial begins and when one ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farandole.errors import UserError
from farandole.files import write_whole

NAME = "tune.json"
COMPLETE, STOPPED_EARLY, FAILED, RUNNING = "complete", "stopped early", "failed", "running"
_FORMAT = 1


@dataclass(frozen=True)
class TrialRecord:
    """One trial. `value` is its last of the metric; `choices` are texts, as they are shown."""

    number: int
    folder: str
    state: str
    value: float | None
    choices: dict[str, str]
    problem: str = ""
    seconds: float | None = None

    @property
    def choices_text(self) -> str:
        """`lr 0.0123, width 64`, in the order in which they were chosen."""
        return ", ".join(f"{name} {value}" for name, value in self.choices.items()) or "–"


@dataclass(frozen=True)
class TuneRecord:
    """`wanted`: how many trials the study shall have; None: nobody has said it."""

    script: str
    metric: str
    higher_is_better: bool
    workers: int
    wanted: int | None
    facts: dict[str, str]
    trials: tuple[TrialRecord, ...] = ()

    def ranked(self) -> list[TrialRecord]:
        """Complete trials first, the best of them at the top; the others by their number."""

        def order(trial: TrialRecord) -> tuple[bool, float, int]:
            if trial.state != COMPLETE or trial.value is None:
                return True, 0.0, trial.number
            return False, -trial.value if self.higher_is_better else trial.value, trial.number

        return sorted(self.trials, key=order)

    @property
    def best(self) -> TrialRecord | None:
        first = next(iter(self.ranked()), None)
        return first if first is not None and first.state == COMPLETE else None

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_whole(folder / NAME, text.encode("utf-8", "replace"))


def read_tune_record(folder: Path) -> TuneRecord:
    """Raises `UserError` for one that cannot be read."""
    path = folder / NAME
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found.pop("format") != _FORMAT:
            raise ValueError("another version of Farandole has written it")
        trials = tuple(TrialRecord(**trial) for trial in found.pop("trials"))
        return TuneRecord(**found, trials=trials)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {error!r}.") from None

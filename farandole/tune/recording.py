"""Keeps `tune.json` beside the trials up to date with their study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.tune.options import TuneOptions
from farandole.tune.page.facts import rows_of
from farandole.tune.record import TrialRecord, TuneRecord
from farandole.tune.study import FOLDER, Study


@dataclass(frozen=True)
class Recording:
    """`folder` is that of the trials; `facts` are told of the study as a whole."""

    folder: Path
    study: Study
    options: TuneOptions
    facts: Mapping[str, str]

    def write(self) -> None:
        """Raises `FarandoleError` when it cannot be written."""
        options = self.options
        folders = {t.number: str(t.user_attrs.get(FOLDER, "")) for t in self.study.trials()}
        trials = tuple(
            TrialRecord(
                row.number,
                folders[row.number],
                row.state,
                row.value,
                row.texts,
                row.problem,
                row.seconds,
            )
            for row in rows_of(self.study)
            if row.number in folders
        )
        wanted = options.trials
        if options.populations is not None and options.generations is not None:
            wanted = options.populations * options.generations
        self.folder.mkdir(parents=True, exist_ok=True)
        TuneRecord(
            options.command[0],
            options.metric,
            options.higher_is_better,
            options.workers,
            wanted,
            dict(self.facts),
            trials,
        ).write(self.folder)

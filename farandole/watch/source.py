"""What is to be seen of a folder now: a race, a study, a run, or a folder with runs in it.

Everything comes from files: `race.json`, `tune.json` and the metrics of each run. Metrics are read
on from where the last look ended. Nothing is asked of the processes that write them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farandole.errors import UserError
from farandole.race.plan import PlannedRun, plan_runs
from farandole.race.progress import config_of
from farandole.race.record import NAME, RaceRecord, is_running, read_record
from farandole.race.runner import RaceConfig, folder_name
from farandole.report.history import Follower, History
from farandole.report.lane import Lane, Outcome
from farandole.report.metrics import FILE_NAME
from farandole.report.target import Target
from farandole.tune.record import FAILED, STOPPED_EARLY, TrialRecord, TuneRecord, read_tune_record
from farandole.tune.record import NAME as STUDY_NAME

SILENT_SECONDS = 300.0
"""A run alone has no launcher to ask: after so long without a line it is shown as unfinished."""
MOST_RUNS = 200  # of a folder that is no race; the newest are shown


@dataclass(frozen=True)
class Watched:
    """What a look has found."""

    lanes: tuple[Lane, ...]
    target: Target | None
    facts: dict[str, str]
    study: TuneRecord | None = None


class WatchedFolder:
    """Looks at one folder, again and again. `target` and `price` take precedence over a race's."""

    def __init__(
        self, folder: Path, target: Target | None = None, price: float | None = None
    ) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder. Runs and races are in runs/.")
        self.folder = folder
        self._target = target
        self._price = price
        self._followers: dict[Path, Follower] = {}
        self._lock = threading.Lock()

    def look(self) -> Watched:
        """Raises `UserError` for a record that cannot be read. Any thread may call it."""
        with self._lock:
            return self._look()

    def _look(self) -> Watched:
        record = read_record(self.folder) if (self.folder / NAME).is_file() else None
        if record is not None:
            lanes, target = self._race(record), self._target
            if target is None and record.target:
                target = Target.parse(record.target)
            found = Watched(tuple(lanes), target, dict(record.facts))
        elif (self.folder / FILE_NAME).is_file():
            found = Watched((self._run(self.folder),), self._target, {})
        elif (self.folder / STUDY_NAME).is_file():
            study = read_tune_record(self.folder)
            found = Watched(tuple(self._trials(study)), self._target, dict(study.facts), study)
        else:
            found = Watched(tuple(self._runs()), self._target, {})
        if self._price is not None:
            priced = tuple(replace(lane, price=self._price) for lane in found.lanes)
            found = replace(found, lanes=priced)
        return found

    def _race(self, record: RaceRecord) -> Iterator[Lane]:
        config = RaceConfig(
            record.command, self.folder, record.settings.get("seed") or 0, price=record.price
        )
        active = is_running(self.folder)
        runs = plan_runs(record.entries, record.seeds, None)
        for run in sorted(runs, key=lambda run: (run.number, run.seed)):
            yield self._race_run(config, record, run, active)

    def _race_run(
        self, config: RaceConfig, record: RaceRecord, run: PlannedRun, active: bool
    ) -> Lane:
        of_run = config_of(config, run)
        lane = of_run.lane(run.entry)
        known = record.find(run.number, run.seed)
        name = folder_name(run.number, lane) + of_run.folder_suffix
        folder = self.folder / (name if known is None else known.folder)
        history = self._history(folder)
        if known is not None:
            outcome, problem, command = known.outcome, known.problem, known.command
            return replace(
                lane,
                history=history,
                folder=folder,
                outcome=outcome,
                problem=problem,
                command=command,
            )
        begun = (folder / "output.log").exists()
        outcome = ("running" if active else "unfinished") if begun else "waiting"
        return replace(lane, history=history, folder=folder, outcome=outcome)

    def _trials(self, study: TuneRecord) -> Iterator[Lane]:
        """Each run as its study knows it. Of a member of a population, its newest interval."""
        known = {trial.folder: trial for trial in study.trials}
        for lane in self._runs():
            trial = known.get(lane.name)
            yield lane if trial is None else _with_trial(lane, trial)

    def _runs(self) -> list[Lane]:
        """Of any folder that has runs in it: the newest, by name."""
        files = [path for path in self.folder.glob(f"*/{FILE_NAME}") if path.is_file()]
        newest = sorted(files, key=lambda path: path.stat().st_mtime)[-MOST_RUNS:]
        return [self._run(path.parent, named=True) for path in sorted(newest, key=_by_number)]

    def _run(self, folder: Path, *, named: bool = False) -> Lane:
        history = self._history(folder)
        seed = history.start.get("seed")
        return Lane(
            folder.name if named else history.sync,
            history.size,
            _outcome(folder / FILE_NAME, history),
            history,
            layout="" if named else history.layout,
            seed=seed if isinstance(seed, int) else None,
            folder=folder,
        )

    def _history(self, folder: Path) -> History:
        path = folder / FILE_NAME
        return self._followers.setdefault(path, Follower(path)).poll()


def _with_trial(lane: Lane, trial: TrialRecord) -> Lane:
    outcome = lane.outcome
    if trial.state == FAILED:
        outcome = "failed"
    elif trial.state == STOPPED_EARLY:
        outcome = "stopped"
    return replace(lane, outcome=outcome, problem=trial.problem)


def _by_number(path: Path) -> tuple[str | int, ...]:
    """`trial-9` before `trial-10`."""
    parts = re.split(r"(\d+)", path.parent.name)
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts))


def _outcome(path: Path, history: History) -> Outcome:
    if history.finished:
        return "ok"
    try:
        silent = time.time() - path.stat().st_mtime
    except OSError:
        return "waiting"
    return "running" if silent < SILENT_SECONDS else "unfinished"


def over(lanes: Sequence[Lane]) -> int:
    """How many are."""
    return sum(lane.outcome not in ("running", "waiting") for lane in lanes)

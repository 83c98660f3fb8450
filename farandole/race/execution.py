"""Runs what is missing of a race, and keeps its record after every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from farandole.race.plan import PlannedRun, better_half, plan_runs, rounds_of
from farandole.race.progress import config_of, run_all
from farandole.race.record import RaceRecord, RunRecord
from farandole.race.runner import RaceConfig, folder_name
from farandole.report.history import Counters, History
from farandole.report.lane import Lane
from farandole.report.target import Target

Key = tuple[int, int]
"""The number of a lane, and a seed."""


class RaceExecution:
    """The runs of one race. Those in `record` that are over are not run again."""

    def __init__(self, config: RaceConfig, record: RaceRecord, target: Target | None) -> None:
        self.record = record
        self._config = config
        self._target = target
        self._lanes: dict[Key, Lane] = {
            (run.number, run.seed): record.lane(config.folder, run) for run in record.runs
        }
        record.write(config.folder)

    def run(self, budget_seconds: float | None) -> str | None:
        """Every lane with every seed. Returns the signal that stopped the race, if one did."""
        return self._run(plan_runs(self.record.entries, self.record.seeds, budget_seconds))

    def halve(self, budget_seconds: float) -> str | None:
        """Successive halving: the better half of the lanes goes on, with twice the time each.

        The first seed decides. The lanes that are left then run with the other seeds too.
        """
        first, *others = self.record.seeds
        planned = plan_runs(self.record.entries, [first], budget_seconds)
        rounds = rounds_of(len(planned))
        for round_ in range(rounds):
            seconds = budget_seconds / 2 ** (rounds - 1 - round_)
            runs = [replace(run, budget_seconds=seconds) for run in planned]
            if (stopped := self._run(runs)) is not None:
                return stopped
            if round_ < rounds - 1:
                # A race that is resumed may know more of a lane than it did at this point.
                lanes = [cut(self._lanes[run.number, first], seconds) for run in planned]
                kept = better_half(planned, lanes, self._target)
                planned = [run for run in planned if run.number in kept]
        return self._run([replace(run, seed=seed) for seed in others for run in planned])

    def lanes(self) -> list[Lane]:
        """All runs, also those that never began: lane by lane, as given, and by seed."""
        return [self._lanes[key] for key in sorted(self._lanes)]

    def outputs(self) -> list[Path]:
        """Where each of them has written what it printed."""
        return [self._folder(*key) / "output.log" for key in sorted(self._lanes)]

    def _run(self, runs: Sequence[PlannedRun]) -> str | None:
        missing = [run for run in runs if self._is_missing(run)]
        if not missing:
            return None
        lanes, stopped_by = run_all(self._config, missing, self._target, self._keep)
        for run, lane in zip(missing, lanes, strict=True):
            self._lanes[run.number, run.seed] = lane
        return stopped_by

    def _is_missing(self, run: PlannedRun) -> bool:
        """Also a run that was stopped before it had as much time as this one gets."""
        known = self.record.find(run.number, run.seed)
        if known is None or known.outcome == "unfinished":
            return True
        if known.outcome != "stopped" or known.budget_seconds is None:
            return False
        lane = self._lanes[run.number, run.seed]
        if self._target is not None and self._target.reached(lane.history) is not None:
            return False
        return run.budget_seconds is None or known.budget_seconds < run.budget_seconds

    def _keep(self, run: PlannedRun, lane: Lane) -> None:
        self._lanes[run.number, run.seed] = lane
        folder = self._folder(run.number, run.seed).name
        self.record = self.record.with_run(
            RunRecord(
                run.number,
                run.seed,
                folder,
                lane.outcome,
                lane.problem,
                lane.command,
                run.budget_seconds,
            )
        )
        self.record.write(self._config.folder)

    def _folder(self, number: int, seed: int) -> Path:
        entry = self.record.entries[number - 1]
        config = config_of(self._config, PlannedRun(number, entry, seed))
        return config.folder / (folder_name(number, config.lane(entry)) + config.folder_suffix)


def cut(lane: Lane, seconds: float) -> Lane:
    """The lane as it was after so many seconds."""
    history = lane.history
    points = tuple(point for point in history.points if point.time_seconds <= seconds)
    if len(points) == len(history.points):
        return lane
    last: Counters = points[-1] if points else Counters()
    shorter = History(history.start, points, last, False, history.damage)
    return replace(lane, history=shorter)

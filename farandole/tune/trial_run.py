"""One trial under way: a `farandole run`, what it asks, what it logs, and how it ends."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farandole.environment import TRIAL
from farandole.errors import UserError
from farandole.launch.nested_runs import (
    PATIENCE_SECONDS,
    RunProcess,
    WarmProcesses,
    problem_of,
)
from farandole.launch.outcome_file import read_outcome
from farandole.report.history import Follower
from farandole.report.metrics import FILE_NAME
from farandole.system.ending import kill_process
from farandole.train.choosing.choice import Value
from farandole.train.choosing.questions import FOLDER as QUESTIONS
from farandole.train.choosing.questions import Answers

State = Literal["ok", "pruned", "failed", "interrupted"]
_METRICS_SECONDS = 0.1  # between two looks at what it has logged


@dataclass(frozen=True)
class Start:
    """What to run, and where."""

    name: str  # of its folder
    folder: Path  # of all trials
    words: Sequence[str]  # after `farandole run --name … --runs …`
    workers_here: int  # on this host, of all trials that run at once
    variables: Mapping[str, str]
    timeout_seconds: float | None
    grace_seconds: float
    fresh: bool = True  # what an earlier one has left in its folder goes


class TrialRun:
    """The caller looks at it often, and answers what it asks. None of its methods waits."""

    def __init__(self, start: Start, warm: WarmProcesses, metric: str) -> None:
        self.start = start
        self.metric = metric
        self.folder = start.folder / start.name
        if start.fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / QUESTIONS, ignore_errors=True)  # of the part before
        self.answers = Answers(self.folder)
        self.reported = 0  # how many values the study has heard of
        self._stopped: tuple[State, str] | None = None
        self._kill_at = math.inf
        self._look_at = 0.0
        self._follower = Follower(self.folder / FILE_NAME)
        self._outcome = self.folder / ".outcome.json"
        self.history = self._follower.poll()  # of the part before
        self.values_before = len(self.values())
        command = [sys.executable, "-m", "farandole", "run", "--name", start.name]
        command += ["--runs", str(start.folder), "--outcome-file", str(self._outcome)]
        variables = {**start.variables, TRIAL: str(self.folder)}
        self.began = time.monotonic()
        with (self.folder / "output.log").open("ab") as sink:
            self.process: RunProcess = warm.start(
                [*command, *start.words], start.workers_here, sink, variables
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_stopping(self) -> bool:
        return self._stopped is not None

    def values(self) -> list[float]:
        """Of the metric, as they were logged."""
        return [point.metrics[self.metric] for point in self.history.series(self.metric)]

    def question(self) -> dict[str, Any] | None:
        return None if self.is_stopping else self.answers.next_question()

    def answer(self, name: str, decide: Callable[[], Value]) -> None:
        """With what `decide` returns. Its `UserError` is raised here too, when the trial has it."""
        try:
            value = decide()
        except UserError as error:
            self.answers.refuse(str(error))
            raise
        self.answers.answer(value)

    def look(self) -> bool:
        """Whether it is over. Reads what it has logged, and ends it where its time is up."""
        ended = self.process.poll() is not None
        now = time.monotonic()
        if ended or now >= self._look_at:
            self.history = self._follower.poll()
            self._look_at = now + _METRICS_SECONDS
        if ended:
            return True
        limit = self.start.timeout_seconds
        if limit is not None and self.seconds > limit and not self.is_stopping:
            last = f"; its last {self.metric} was {v[-1]:g}" if (v := self.values()) else ""
            self.stop("failed", f"ended after its timeout of {limit:g} s{last}")
        if now > self._kill_at:
            kill_process(self.process)
            self._kill_at = math.inf
        return False

    def stop(self, state: State, why: str) -> None:
        """Begins its end. A run that does not end by itself is killed when its grace is over."""
        if self.is_stopping:
            return
        self._stopped = state, why
        self.process.send_signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + self.start.grace_seconds + PATIENCE_SECONDS

    def result(self) -> tuple[State, str]:
        """How it ended, and why it did not end well. Call it when it is over."""
        if self._stopped is not None:
            return self._stopped
        code = self.process.poll()
        assert code is not None
        outcome = read_outcome(self._outcome)
        self._outcome.unlink(missing_ok=True)
        if code != 0 or not self.history.finished:
            return "failed", problem_of(self.folder / "output.log", code, outcome)
        values = self.values()
        if values and not math.isfinite(values[-1]):
            return "failed", f"its last {self.metric} is {values[-1]}"
        return "ok", ""

    def end(self) -> None:
        """At once, whatever it does."""
        if self.process.poll() is None:
            kill_process(self.process)
        self._outcome.unlink(missing_ok=True)

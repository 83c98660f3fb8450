"""Starts all workers of a job again when one has failed: from the last checkpoint, if there is one.

For jobs whose workers cannot go on without a lost one, because it held something that no other one
has, such as a stage of a pipeline.

    attempt 0    saves 000000, 000001 …   rank 2 is killed: the others are stopped
    attempt 1    goes on from 000001, in the same folder …

Each attempt is a job of its own, with its own store and log files. What they share is the name of
the run: the first one reports it, also if the script or the clock has chosen it, and the next ones
are told. Whether a run goes on from a checkpoint is its own business: see `docs/checkpoints.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from farandole.environment import ATTEMPT, CHECKPOINT, NAME
from farandole.errors import LaunchError
from farandole.launch.job import Job, LostResourceError, Outcome
from farandole.launch.messages import tell
from farandole.launch.outcome_text import name_of_worker
from farandole.launch.policies.elastic.restarts import Restarts
from farandole.launch.probes.problems import UnfitHostsError
from farandole.topology import Topology
from farandole.worker.failure import Failure, Kind
from farandole.worker.run_report import RunReport
from farandole.worker.signals import signals_noted, warnings_passed_on

_RECENT_SECONDS = 60.0  # workers take seconds to start: several quick failures fit into it
_POLL_SECONDS = 0.05
_WISHES = ("SIGINT", "SIGUSR1")  # of a user, and of a scheduler that is about to end the job

Launch = Callable[[Job, frozenset[str]], Outcome]
"""Runs a job on all hosts but these."""
Fewer = Callable[[frozenset[str]], int | None]
"""How many workers a job can go on with on all hosts but these; None: not with so few."""


def launch_with_restarts(
    launch: Launch,
    job: Job,
    topology: Topology,
    most: int,
    fewer: Fewer = lambda lost: None,
) -> Outcome:
    """Runs `job` by `launch`, and again when it fails, up to `most` times.

    Where hosts do not answer at a restart, the others go on without them, if there are enough
    (`fewer`). The next restart looks for them again.

    Returns how the last attempt ended. Not started again is a job that was stopped by a signal,
    whose script was called wrongly, or that has failed in the same way twice without a newer
    checkpoint between the two. Raises `LaunchError` when workers cannot be started at first, or at
    the end of all restarts. A tolerant job is left to start its workers again one by one.
    """
    if not most or job.tolerant:
        return launch(job, frozenset())
    attempts = _Attempts(job, topology, most)
    while True:
        try:
            outcome = attempts.launch(launch, fewer)
        except LaunchError as error:
            if not attempts.survive(error):
                raise
        else:
            if not attempts.go_on_after(outcome):
                return outcome
        stopped_by = attempts.wait()
        if stopped_by is not None:
            return Outcome(stopped_by=stopped_by)


class _Attempts:
    """Of one job: how many there were, and what is known of the run from them."""

    def __init__(self, job: Job, topology: Topology, most: int) -> None:
        self._job = job
        self._topology = topology
        self._restarts = Restarts(most, _RECENT_SECONDS)
        self._begun = 0
        self._run: RunReport | None = None
        self._last_words: tuple[int, str] | None = None

    def launch(self, launch: Launch, fewer: Fewer) -> Outcome:
        """The next attempt."""
        job, lost = self._next_job(), frozenset[str]()
        while True:
            try:
                return launch(job, lost)
            except UnfitHostsError as error:
                lost |= error.hosts
                workers = fewer(lost) if self._begun > 1 else None
                if workers is None:
                    raise
                tell(f"{error}")
                tell(f"{workers} workers start without {', '.join(sorted(lost))} (--min)")
                job = replace(job, workers=workers)

    def _next_job(self) -> Job:
        variables = {**self._job.environment, ATTEMPT: str(self._begun)}
        if self._run is not None:
            variables[NAME] = self._run.name
        self._begun += 1
        return replace(self._job, environment=variables)

    def survive(self, error: LaunchError) -> bool:
        """Whether to try again: not at first, when something may be wrong with the command, unless
        the workers had what they needed, and lost it."""
        had_all = isinstance(error, LostResourceError)
        if not self._restarts.left or (self._begun == 1 and not had_all):
            return False
        if isinstance(error, LostResourceError):
            self._take_in(error.report)
            tell(error.how)
        else:
            tell(f"{error}")
        tell(f"{self._next_start()}, {self._origin()}")
        self._restarts.note_failure()
        return True

    def go_on_after(self, outcome: Outcome) -> bool:
        """Whether the job is to be started again. Says why, or why not, if it has failed."""
        failure = outcome.failure
        if failure is None or outcome.stopped_by is not None or outcome.received is not None:
            return False
        why_not = self._why_not_again(failure, self._take_in(outcome.report))
        if why_not is not None:
            tell(f"not started again: {why_not}")
            return False
        who = name_of_worker(failure.rank, "rank", self._topology)
        tell(f"{who} {failure.how}. Every rank's output is in {outcome.logs}")
        tell(f"{self._next_start()}, {self._origin()}")
        self._restarts.note_failure()
        return True

    def wait(self) -> str | None:
        """Until the next attempt may begin. Returns the signal that has stopped the job, if any."""
        with (
            signals_noted() as received,
            warnings_passed_on(lambda number: received.append(number.name)),
        ):
            while not received:
                if self._restarts.take(1):
                    return None
                time.sleep(_POLL_SECONDS)
        return received[0]

    def _take_in(self, report: RunReport | None) -> bool:
        """Whether the run has a newer checkpoint than before."""
        if report is None:  # it ended before `fd.init`
            return False
        earlier, self._run = self._run, report.after(self._run)
        return self._run.has_got_further(earlier)

    def _why_not_again(self, failure: Failure, has_got_further: bool) -> str | None:
        words, self._last_words = self._last_words, _last_words(failure)
        if failure.killed_by in _WISHES:
            return f"{failure.killed_by} says that it shall end"
        if failure.is_wrong_use:
            return "the script was called wrongly, or asks for what cannot be"
        if not has_got_further and words is not None and words == self._last_words:
            return "it has failed twice in the same way, without a newer checkpoint between the two"
        if not self._restarts.left:
            return f"all {self._restarts.most} restarts are used up"
        return None

    def _next_start(self) -> str:
        number = self._restarts.most - self._restarts.left + 1
        workers = f"all {self._job.workers} workers start" if self._job.workers > 1 else "it starts"
        return f"{workers} again ({number} of {self._restarts.most} restarts)"

    def _origin(self) -> str:
        """What the next attempt goes on from, as far as it is known here."""
        run = self._run
        if run is None:
            return "from the beginning: no worker had come through fd.init()"
        if run.checkpoint is None and run.leaves_state:
            return "from what the survivors have left, or else from the beginning"
        if run.checkpoint is None:
            saves = CHECKPOINT in self._job.environment
            hint = "" if saves else ". `--checkpoint every=10min` saves them"
            return f"from the beginning: it has neither saved nor loaded a checkpoint so far{hint}"
        if not run.resumes:
            return (
                f"from the beginning, unless the script loads {run.checkpoint} itself: so far it "
                "has not looked for checkpoints there (run.load(), or --checkpoint and run.epochs)"
            )
        place = f"from {run.checkpoint}"
        if run.leaves_state:
            place = f"from what the survivors have left, or else {place}"
        if not run.checkpoint_steps:
            return place
        place += f" (step {run.checkpoint_steps}, epoch {run.checkpoint_epoch})"
        behind = run.steps - run.checkpoint_steps
        return f"{place}: {behind} steps or a few more are repeated" if behind > 0 else place


def _last_words(failure: Failure) -> tuple[int, str] | None:
    """By which a failure is known again: how the script ended by itself, and what it said last.

    None: a signal or the loss of another worker has ended it, which says nothing about the script.
    """
    if failure.kind is not Kind.OWN or failure.exit_code < 0:
        return None
    lines = failure.error.strip().splitlines()
    return failure.exit_code, lines[-1] if lines else ""

"""`--per-gpu auto`: trains for a few steps with 1, 2, 4 and 8 workers a GPU, one after the other.

Each trial is a `farandole run --per-gpu K` of its own, with its own processes and MPS daemon, so
that nothing carries over. Its rank 0 writes how fast it trains (`worker/trial`), and is stopped
when that is known. What a trial writes is in a temporary folder, which is removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farandole.environment import GPU_TRIAL, TRACE
from farandole.errors import FarandoleError, LaunchError, UserError
from farandole.launch.gpu.mps_control import PIPE_DIRECTORY
from farandole.launch.gpu.nvidia_smi import list_gpus
from farandole.launch.gpu.trial_table import Trial, table
from farandole.launch.gpu.use_sampler import UseSampler
from farandole.launch.gpu.visible import VARIABLE, visible_gpus
from farandole.launch.messages import tell, write_error
from farandole.launch.outcome_file import OutcomeRecord, read_outcome
from farandole.system.ending import end_process
from farandole.system.orphans import tied_to_this_process
from farandole.system.owned_folders import OwnedFolder
from farandole.system.watchdog import Watchdog
from farandole.worker.grace import DEFAULT_SECONDS
from farandole.worker.signals import signals_raised
from farandole.worker.trial.record import WARM_UP_STEPS, ThroughputRecord, read_trial

COUNTS = (1, 2, 4, 8)
_POLL_SECONDS = 0.25
_LIMIT_SECONDS = 900.0  # for one trial, with its start
_LIMIT_TEXT = "15 minutes"
_STOP_SECONDS = DEFAULT_SECONDS + 10.0
_SHOWN_LINES = 15
_USAGE_CODE = 2
_INSTEAD = "Or give a number, such as --per-gpu 4."


def find_fastest(words: Sequence[str]) -> int:
    """The number of workers a GPU with the most samples/s, of `farandole run` with these words.

    Prints a table. Where a number fails, larger ones are not tried, and what was measured before
    counts. Raises `LaunchError` or `UserError` where nothing was, and `Stopped` on a signal.
    """
    uuids = _uuids()
    tell(
        f"--per-gpu auto: tries {', '.join(map(str, COUNTS))} workers a GPU with the beginning of "
        "the script"
    )
    folder = _folder()
    watchdog = Watchdog(folders=[folder.path])
    try:
        with signals_raised():
            trials = _try_all(words, folder.path, uuids)
    finally:
        folder.close()
        watchdog.close()
    write_error(table(trials))
    measured = [trial for trial in trials if trial.samples_per_second]
    if not measured:
        raise _none_works(trials)
    best = max(measured, key=lambda trial: trial.samples_per_second or 0.0)
    tell(f"{best.per_gpu} worker(s) a GPU are the fastest: starts with --per-gpu {best.per_gpu}")
    return best.per_gpu


def _uuids() -> list[str]:
    """Of the GPUs that the trials use, to look at; none where they cannot be told.

    A list of numbers counts the GPUs of a daemon of the user's own, if there is one.
    """
    gpus = list_gpus()
    if PIPE_DIRECTORY in os.environ and VARIABLE in os.environ:
        return []
    return [gpu.uuid for gpu in visible_gpus(gpus, os.environ)]


def _folder() -> OwnedFolder:
    try:
        return OwnedFolder("trial")
    except OSError as error:
        raise LaunchError(
            f"cannot keep the trials' output: {error}. Set TMPDIR to a folder with room."
        ) from error


def _try_all(words: Sequence[str], folder: Path, uuids: Sequence[str]) -> list[Trial]:
    """Raises the error of a trial where none before it was measured."""
    trials: list[Trial] = []
    for per_gpu in COUNTS:
        if trials and trials[-1].error is not None:
            rest = COUNTS[COUNTS.index(per_gpu) :]
            why = f"not tried, after {trials[-1].per_gpu} failed"
            return [*trials, *(Trial(each, problem=why) for each in rest)]
        trials.append(trial := _try(per_gpu, words, folder, uuids))
        if trial.error is not None and not any(each.samples_per_second for each in trials):
            raise trial.error
    return trials


def _try(per_gpu: int, words: Sequence[str], folder: Path, uuids: Sequence[str]) -> Trial:
    record, ended, output = (folder / f"{per_gpu}.{kind}" for kind in ("trial", "end", "out"))
    own = ["--per-gpu", str(per_gpu), "--runs", str(folder), "--name", f"trial-{per_gpu}"]
    command = [sys.executable, "-m", "farandole", "run", *own, "--outcome-file", str(ended), *words]
    # No trace of a trial: the variable is an option of `farandole run` too.
    variables = {name: value for name, value in os.environ.items() if name != TRACE}
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**variables, GPU_TRIAL: str(record), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
    sampler = UseSampler(uuids)
    try:
        is_over = _follow(process, record, sampler)
    finally:
        if process.poll() is None:
            end_process(process, _STOP_SECONDS)
    trial = Trial(per_gpu)
    found = read_trial(record)
    is_measured = found is not None and (found.is_enough or process.returncode == 0)
    if found is not None and is_measured and found.samples_per_second is not None:
        return replace(sampler.added_to(trial), record=found)
    if is_over:
        return _failed(trial, _End.read(process.returncode, ended, output), found)
    late = f"no result within {_LIMIT_TEXT}"
    if found is None:
        came = f"came from run.loader or trainer.loader within {_LIMIT_TEXT}"
        return replace(trial, problem=late, error=_no_batches(came))
    error = LaunchError(f"--per-gpu auto: {late} with {per_gpu} worker(s) a GPU. {_INSTEAD}")
    return replace(trial, problem=late, error=error)


def _follow(process: subprocess.Popen[bytes], record: Path, sampler: UseSampler) -> bool:
    """Until the trial has measured enough, or has ended. False: it has taken too long."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            found = read_trial(record)
            if found is not None:  # the warm-up is over
                sampler.sample()  # it goes on training until it is stopped
            if found is not None and found.is_enough:
                return True
        else:
            return True
    return False


@dataclass(frozen=True)
class _End:
    """Of a trial's process: its code, what its launcher has noted, and what it said."""

    code: int
    outcome: OutcomeRecord | None
    lines: Sequence[str]

    @classmethod
    def read(cls, code: int, ended: Path, output: Path) -> _End:
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        # The folder of the trials is removed, and with it the logs that such a line names.
        gone = f"output is in {output.parent}"
        return cls(code, read_outcome(ended), [line for line in lines if gone not in line])

    @property
    def problem(self) -> str:
        """In one line."""
        said = self.outcome.problem if self.outcome is not None else ""
        if not said and self.lines:
            said = self.lines[-1].removeprefix("farandole: ")
        return said or f"exit code {self.code}"


def _failed(trial: Trial, end: _End, record: ThroughputRecord | None) -> Trial:
    """A trial that has ended without a result."""
    error: FarandoleError
    if end.code == 0:
        error = _no_throughput(record, joined=end.outcome is not None and end.outcome.joined)
        return replace(trial, problem="the script ended before it was measured", error=error)
    if end.outcome is not None and end.outcome.is_out_of_memory:
        return replace(trial, problem="out of memory", error=_too_large(trial.per_gpu))
    if end.outcome is None and end.code == _USAGE_CODE:  # refused, as where workers are too few
        return replace(trial, problem=end.problem)  # for the layout: larger numbers may fit it
    said = "\n".join(end.lines[-_SHOWN_LINES:])
    error = LaunchError(
        f"the trial with {trial.per_gpu} worker(s) a GPU failed (exit code {end.code}). Its last "
        f"lines were:\n{said}\nMend that, and start the job again. Without trials, all of the "
        f"output is shown: --per-gpu {trial.per_gpu}"
    )
    return replace(trial, problem=end.problem, error=error)


def _no_throughput(record: ThroughputRecord | None, *, joined: bool) -> UserError:
    if not joined:
        return UserError(
            "--per-gpu auto: the script never called fd.init(), so that nothing was measured. "
            f"Write `run = fd.init()` at its top, and read its data from run.loader. {_INSTEAD}"
        )
    steps = 0 if record is None else record.warm_up_steps + record.steps
    if not steps:
        return _no_batches("came from run.loader or trainer.loader")
    return UserError(
        f"--per-gpu auto: the script ended after {steps} training step(s), and the first "
        f"{WARM_UP_STEPS} are warm-up. Give it more data or more epochs. {_INSTEAD}"
    )


def _no_batches(came: str) -> UserError:
    return UserError(
        f"--per-gpu auto: no training batch {came}, so that samples/s cannot be measured. Write "
        f"`for x, y in run.loader(dataset, batch_size=…)`. {_INSTEAD}"
    )


def _too_large(per_gpu: int) -> LaunchError:
    return LaunchError(
        f"the script runs out of GPU memory with {per_gpu} worker(s) a GPU already. Give it a "
        "smaller batch, or cut its model: --layout stages=2 with 2 GPUs or more."
    )


def _none_works(trials: Sequence[Trial]) -> LaunchError:
    first = trials[0]
    return LaunchError(f"no number of workers a GPU works: with {first.per_gpu}, {first.problem}")

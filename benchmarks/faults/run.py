"""One drill, from the start of its job to its verdict."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

from faults import actions, prepare
from faults.hooks import PHASE, RANKS, TAG
from faults.look import leftovers
from faults.place import Place
from faults.settings import SETTINGS
from faults.slot import Process, Slot
from faults.table import Drill
from faults.targets import process_of, targets
from faults.weights import Baselines, weights_in, wrong

_REACH_SECONDS = 150.0  # on a busy machine importing torch takes its time
_BEYOND_SECONDS = 30.0  # past its promise a job is ended, so that the table goes on


@dataclass
class Verdict:
    """How a drill went. It is as promised when nothing is `broken`."""

    drill: str
    seconds: float | None = None  # from the fault to the end of the job
    recovery_seconds: float | None = None  # until all ranks that go on have taken a step again
    code: int | None = None
    named: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    output: str = ""  # its end, if a promise is broken
    skipped: str = ""


def run_drill(drill: Drill, slot: Slot, baselines: Baselines) -> Verdict:
    """Runs it, looks, and cleans up, whatever happens."""
    if prepare.needs_root(drill.action, drill.setting) and not prepare.is_root():
        return Verdict(drill.name, skipped="needs root")
    place = prepare.place_for(drill.action, slot)
    trial = _Trial(drill, place, baselines)
    try:
        with prepare.disk_for(drill.action, place):
            trial.run()
            trial.judge()
    except Exception as error:  # of the harness: a row of the table, not the table's end
        trial.verdict.broken.append(f"the drill itself failed: {type(error).__name__}: {error}")
    finally:
        if trial.verdict.broken:
            trial.verdict.output = place.said()[-3000:]
        place.close()
    return trial.verdict


class _Trial:
    def __init__(self, drill: Drill, place: Place, baselines: Baselines) -> None:
        self.drill = drill
        self.place = place
        self.verdict = Verdict(drill.name)
        self._setting = SETTINGS[drill.setting]
        self._baselines = baselines
        self._growth_mib = 0.0

    def run(self) -> None:
        """Starts the job, strikes, and waits for its end."""
        drill = self.drill
        if drill.setting == "elastic":
            prepare.write_discovery(self.place)
        if drill.role == "the newest checkpoint":
            self._baselines.copy_runs(drill.setting, self.place.folder)
            prepare.damage(drill.action, prepare.checkpoints_of(self.place.folder))
        job = self._start({PHASE: drill.phase or "none", RANKS: drill.holds})
        struck = time.monotonic()
        if drill.phase:
            self._await_phase(job)
            with self._fault() as struck:
                (self.place.folder / "go").touch()
                self._await_end(job, struck)
        else:
            self._await_end(job, struck)
        self.verdict.seconds = round(time.monotonic() - struck, 2)
        self._measure_recovery(struck)

    def judge(self) -> None:
        """Compares what happened with the promise."""
        promise, verdict = self.drill.promise, self.verdict
        said = self.place.said()
        launcher = self.place.started[0]
        code = launcher.returncode
        verdict.code = None if code is None else code if code >= 0 else 128 - code
        if verdict.code not in promise.codes:
            expected = " or ".join(map(str, promise.codes))
            verdict.broken.append(f"exit code {verdict.code}, not {expected}")
        if verdict.seconds is not None and verdict.seconds > promise.seconds:
            verdict.broken.append(f"took {verdict.seconds:.0f} s, not {promise.seconds:.0f}")
        for pattern in promise.names:
            match = re.search(pattern, said)
            if match:
                verdict.named.append(match[0][:80])
            else:
                verdict.broken.append(f"nothing in the output matches {pattern!r}")
        verdict.left = leftovers(self.place, launcher.pid, promise.may_leave)
        verdict.broken += [f"left {one}" for one in verdict.left]
        if promise.growth_mib is not None and self._growth_mib > promise.growth_mib:
            verdict.broken.append(f"a process grew by {self._growth_mib:.0f} MiB")
        if self.drill.again:
            self._run_again()
        if promise.right:
            self._judge_weights()
        if self.drill.action == "nothing" and not verdict.broken:
            self._baselines.keep(self.drill.setting, self.place.folder)

    def _start(self, held: dict[str, str], output: str = "output") -> Process:
        drill = self.drill
        script = prepare.script_for(drill.action, self.place)
        command = [*prepare.limits_for(drill.action), *self._setting.line(drill.options, script)]
        variables = {**prepare.variables_for(drill), **held}
        warm = self._setting.command == "run"  # others would hand the fork server on
        return self.place.start(command, variables, output, warm=warm)

    def _start_beside(self, tag: str) -> Process:
        """The same command once more, in the same folder, held nowhere."""
        return self._start({PHASE: "none", TAG: f"-{tag}"}, tag)

    def _await_phase(self, job: Process) -> None:
        """Until those that are held have reached the phase, and the others are where they wait."""
        drill = self.drill
        ranks = range(self._setting.workers) if drill.setting != "emulate" else range(1)
        held = [str(rank) for rank in ranks] if drill.holds == "all" else [drill.holds]
        others = [rank for rank in map(str, ranks) if rank not in held]
        where = drill.phase.replace(" ", "_")

        def all_there() -> bool:
            waited = held + (others if drill.phase in ("collective", "finished") else [])
            return all((self.place.folder / f"reached-{where}-{rank}").exists() for rank in waited)

        self._wait(lambda: all_there() or job.poll() is not None, _REACH_SECONDS)
        if not all_there():
            raise TimeoutError(f"ranks {held} never were in phase {drill.phase!r}")
        if drill.phase == "finished":
            gone = [int(rank) for rank in others]
            self._wait(lambda: not any(self._runs(rank) for rank in gone), _BEYOND_SECONDS)

    def _runs(self, rank: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process_of(self.drill.phase, rank, self.place).status() != psutil.STATUS_ZOMBIE
        return False

    @contextlib.contextmanager
    def _fault(self) -> Iterator[float]:
        """Strikes; what must go on while the job does ends with the context. Says when it was."""
        drill = self.drill
        if drill.role == "every port":
            before = self._memory()
            with actions.strangers(drill.action, self.place):
                after = self._memory()
                growths = [after[pid] - before[pid] for pid in after.keys() & before.keys()]
                self._growth_mib = max(growths, default=0.0)
                yield time.monotonic()
        elif drill.role == "another job":
            self._start_second()
            yield time.monotonic()
        else:
            found = targets(drill, self.place)
            struck = time.monotonic()
            actions.strike(drill.action, found)
            yield struck

    def _memory(self) -> dict[int, float]:
        found = {}
        for process in self.place.processes():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.memory_info().rss / 2**20
        return found

    def _start_second(self) -> None:
        """The same command beside the first: it must be refused, and say why."""
        second = self._start_beside("second")
        limit = self.drill.promise.seconds
        self._wait(lambda: second.poll() is not None, limit)
        said = self.place.said("second")
        match = re.search(r"CheckpointError: .*|farandole: .*(lock|another).*", said)
        if second.returncode in (None, 0) or match is None:
            self.verdict.broken.append(f"the second job was not refused: {said[-500:]}")
        else:
            self.verdict.named.append(match[0][:80])

    def _await_end(self, job: Process, struck: float) -> None:
        """Of the launcher; of all its processes if it was killed itself."""
        promise = self.drill.promise
        limit = struck + promise.seconds + _BEYOND_SECONDS - time.monotonic()
        if not self._wait(lambda: job.poll() is not None, limit):
            self.verdict.broken.append(f"had not ended after {time.monotonic() - struck:.0f} s")
        if (self.drill.role, self.drill.action) == ("launcher", "SIGKILL"):
            self._wait(lambda: not self.place.processes(), promise.seconds)

    def _measure_recovery(self, struck: float) -> None:
        """Of those ranks that have gone on."""
        first_steps = []
        for file in self.place.folder.glob("steps-*"):
            times = [float(line) for line in file.read_text().split()]
            first_steps += [min(after) for after in [[t for t in times if t > struck]] if after]
        if self.drill.phase and self.place.started[0].returncode == 0 and first_steps:
            self.verdict.recovery_seconds = round(max(first_steps) - struck, 2)

    def _run_again(self) -> None:
        job = self._start_beside("again")
        if not self._wait(lambda: job.poll() is not None, _REACH_SECONDS) or job.returncode:
            said = self.place.said("again")[-500:]
            self.verdict.broken.append(f"started again it ended with {job.returncode}: {said}")

    def _judge_weights(self) -> None:
        expected = self._baselines.weights(self.drill.setting)
        found = weights_in(self.place.folder)
        problem = wrong(found, expected, self._setting.weights)
        if problem:
            self.verdict.broken.append(problem)

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

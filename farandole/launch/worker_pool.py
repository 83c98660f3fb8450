"""The workers of one job: starts them through a backend, sees their ends, stops them.

Everything that any policy needs to do with processes is here; which of it to do, a policy decides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals

from farandole.launch.backends.base import Backend, Worker, WorkerSpec
from farandole.launch.backends.remote.worker import UNREACHABLE
from farandole.launch.backends.stopping import stop_workers
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.messages import tell
from farandole.launch.output import Relay
from farandole.launch.watches.exit_watch import Location, Overdue
from farandole.launch.watches.progress import Progress
from farandole.launch.watches.stall_watch import StallWatch
from farandole.system.activity import STACK_SIGNAL
from farandole.worker.failure import Failure
from farandole.worker.marker_files import any_saves
from farandole.worker.run_report import KEY, RunReport, read_report


class WorkerPool:
    """`running` are those whose end `collect` has not seen yet, by number."""

    def __init__(
        self,
        job: Job,
        directory: JobDirectory,
        endpoint: LauncherEndpoint,
        backend: Backend,
        workers_by_host: Mapping[str, int] | None = None,  # that are to be started soon, if known
    ) -> None:
        self.running: dict[int, Worker] = {}
        self.told_to_stop_ns: dict[int, int] = {}  # whom `stop` has asked to end, and when
        self.directory = directory
        self.endpoint = endpoint
        self._backend = backend
        self._workers_by_host = workers_by_host or {}
        self._ended: dict[int, Worker] = {}
        self._grace_seconds = job.grace_seconds
        self._check = job.check
        self._stalls = StallWatch(
            directory.folder,
            job.stall_seconds,
            kill=job.stall_kill,
            progress_of=self._progress,
            ask=self._ask_for_stack,
        )
        self._relay = Relay(())

    def open(self, received: Sequence[str]) -> None:
        """Call it before the first start. Returns early when a signal is `received`.

        Raises `LaunchError` naming each host that cannot take part.
        """
        self._relay.start()
        for host, workers in self._workers_by_host.items():
            self._backend.expect(host, workers)
        self._backend.await_hosts(received)
        self.directory.prepare(received)  # began before, and so takes no longer than the hosts do

    def reaches(self, host: str) -> bool:
        return self._backend.reaches(host)

    def start(
        self, number: int, host: str, local_workers: int, variables: Mapping[str, str]
    ) -> None:
        """Starts worker `number`, perhaps once more. Raises `LaunchError` where it cannot."""
        if number not in self._ended:  # else its files have been followed since its first start
            self._relay.follow(self.directory.sources_of(number))
        watched = self._stalls.expect(number)
        spec = WorkerSpec(number, host, local_workers, {**variables, **watched})
        self.running[number] = self._backend.start(spec)

    def collect(self) -> dict[int, int]:
        """The exit codes of those that have ended since the last call."""
        codes = {number: worker.poll() for number, worker in self.running.items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        for number in ended:
            self._ended[number] = self.running.pop(number)
        return ended

    def locations(self) -> dict[int, Location]:
        """Where each running worker is."""
        return {
            number: Location(worker.pid, worker.host) for number, worker in self.running.items()
        }

    def check(self) -> None:
        """Raises what `Job.check` does."""
        if self._check is not None:
            self._check()

    def stalled(self) -> list[Overdue]:
        """Who is to be ended because it makes no step."""
        return self._stalls.look(self.locations())

    def _progress(self, number: int, path: Path) -> Progress:
        return self.running[number].progress(path)

    def _ask_for_stack(self, number: int) -> None:
        self.running[number].send(STACK_SIGNAL)

    def failure(self, number: int, code: int, noticed_seconds: int) -> Failure:
        """What a worker that ended badly has left, and what its backend knows about that."""
        failure = self.directory.failure(number, code, noticed_seconds)
        advice = self._ended[number].advice if number in self._ended else ""
        return replace(failure, error=f"{failure.error}\n{advice}".strip()) if advice else failure

    def is_host_lost(self, number: int) -> bool:
        """Whether a worker that has ended did so because its host could not be reached."""
        worker = self._ended[number]
        return worker.poll() == UNREACHABLE and bool(worker.advice)

    def end(self, number: int) -> int:
        """Stops one worker, and waits for it. Returns its exit code, or 0 if it does not end."""
        worker = self._ended[number] = self.running.pop(number)
        stop_workers([worker], self._grace_seconds)
        return worker.poll() or 0

    def kill(self, number: int) -> None:
        """Ends one worker without asking. `collect` tells when it has ended."""
        self.running[number].kill()

    def kill_children(self, number: int) -> None:
        """Those that a worker that has ended left on this host. Elsewhere its agent sees to it."""
        if self._ended[number].pid is not None:
            self.directory.kill(number)

    def send(self, number: Signals) -> None:
        """A signal to every worker."""
        for worker in list(self.running.values()):
            worker.send(number)

    def stop(self, received: Sequence[str] = ()) -> None:
        """Ends all that run. Does not wait any longer when one more signal is `received`."""
        for number, worker in self.running.items():
            if worker.poll() is None:
                # The time is noted before the signal is sent: a worker that fails after it may have
                # failed because of it. `setdefault` keeps the first time, because `stop` runs
                # twice.
                self.told_to_stop_ns.setdefault(number, time.time_ns())
        stop_workers(self.running.values(), self._grace_seconds, received)

    def announce_grace(self, stopped_by: str) -> None:
        """Says how long the job has, if any of its workers saves before it leaves."""
        if any_saves(self.directory.folder):
            seconds = f"{self._grace_seconds:g}"
            tell(f"{stopped_by}: the workers have {seconds} s to save and leave (--grace)")

    def mark_interrupted(self) -> None:
        """The user has stopped the job: its runs do not count that as a failure."""
        self._backend.mark_interrupted()

    def has_joined(self) -> bool:
        """Whether any worker took part: by our own calls, or else by torch's, in the store."""
        return self.directory.has_joined() or self.endpoint.store.key_count() > 0

    def report(self) -> RunReport | None:
        """What the run has told of itself, if the job may be started again."""
        return read_report(self.endpoint.store.value(KEY))

    def close(self, *, keep_logs: bool) -> None:
        """The job is over: leaves no process, and shows the rest of the output."""
        self._backend.close()
        self.directory.reap()
        self._relay.stop()
        self.endpoint.store.close()
        self.directory.close(keep_logs=keep_logs)

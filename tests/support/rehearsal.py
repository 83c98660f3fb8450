"""An elastic job whose processes only sleep: the test speaks for them, look by look.

What they say to the launcher, and hear from it, goes through a real store.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from farandole.environment import ELASTIC_WORKER
from farandole.launch.backends.local import LocalBackend
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.job import ElasticJob, TrainingLimits
from farandole.launch.policies.elastic.policy import Elastic
from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
from farandole.launch.policies.elastic.training_policy import ElasticTrainingPolicy
from farandole.launch.supervisor import step
from farandole.launch.worker_pool import WorkerPool
from farandole.worker.elastic import HostChanges, ask_launcher, generation, next_assignment
from farandole.worker.environment import RankAssignment
from farandole.worker.store.job_store import JobStore

PATIENCE = timedelta(seconds=150)


class Everywhere(LocalBackend):
    """All hosts are this one, except those called `far…`, which cannot reach the launcher."""

    def reaches(self, host: str) -> bool:
        return not host.startswith("far")


class Rehearsal:
    """Workers that sleep, and a voice for each of them."""

    def __init__(self, hosts: dict[str, int], command: str = "exec sleep 600", **options: object):
        settings = {"min_workers": 1, "max_workers": None, **options}
        words = ("sh", "-c", command)
        job = ElasticJob(words, discover=dict, whole_command=True, **settings)  # type: ignore[arg-type]
        each = Job(1, words[1:], program=words[0])
        directory = JobDirectory(each, ELASTIC_WORKER)
        self.store = JobStore(directory.folder)
        endpoint = LauncherEndpoint(self.store)
        backend = Everywhere(each, directory, endpoint)
        self.pool = WorkerPool(each, directory, endpoint, backend)
        self.pool.open(())
        self.rendezvous = RendezvousServer(self.store)
        self.discovery = Discovery(dict)
        self.discovery.hosts = hosts
        self.policy = self.made_policy(job, each)
        self.voices = ThreadPoolExecutor(16)
        self.environments: dict[int, dict[str, str]] = {}

    def made_policy(self, job: ElasticJob, each: Job) -> Elastic:
        return Elastic(job, self.pool, self.rendezvous, self.discovery)

    def close(self) -> None:
        self.pool.stop()
        for worker in self.rendezvous.asking(self.environments):  # else its voice would wait on
            self.rendezvous.dismiss(worker)
        self.voices.shutdown()
        self.pool.close(keep_logs=False)

    def workers(self) -> dict[int, int | None]:
        """The process of each worker that runs."""
        return {number: worker.pid for number, worker in self.pool.running.items()}

    def look_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while not condition():
            assert time.monotonic() < deadline
            step(self.pool, self.policy)
            time.sleep(0.002)

    def look(self) -> None:
        """Often enough that nothing is left to be done."""
        for _ in range(5):
            step(self.pool, self.policy)

    def ask(self, *workers: int) -> dict[int, Future[RankAssignment]]:
        asked = {}
        for worker in workers:
            environ = self.environment(worker)
            asked[worker] = self.voices.submit(
                next_assignment, environ, generation(environ), PATIENCE
            )
        self.look_until(lambda: set(workers) & self.heard() == set(workers) - self.told(asked))
        return asked

    def environment(self, worker: int) -> dict[str, str]:
        return self.environments.setdefault(
            worker,
            {
                ELASTIC_WORKER: str(worker),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                **self.store.here().variables(),
                "FARANDOLE_JOB": "j",
            },
        )

    def heard(self) -> set[int]:
        return set(self.rendezvous.asking(self.pool.running))

    @staticmethod
    def told(asked: dict[int, Future[RankAssignment]]) -> set[int]:
        return {worker for worker, future in asked.items() if future.done()}

    def ranks(self, *workers: int) -> dict[int, tuple[int, int]]:
        """All of them ask: the rank and the local rank that each gets, by worker."""
        return self.answers(self.ask(*workers))

    def answers(self, asked: dict[int, Future[RankAssignment]]) -> dict[int, tuple[int, int]]:
        self.look_until(lambda: all(future.done() for future in asked.values()))
        found = {worker: future.result() for worker, future in asked.items()}
        assert {assignment.size for assignment in found.values()} == {len(found)}
        return {
            worker: (assignment.rank, assignment.local_rank) for worker, assignment in found.items()
        }

    def leaves(self, asked: Future[RankAssignment]) -> bool:
        self.look_until(asked.done)
        with pytest.raises(SystemExit) as leaving:
            asked.result()
        return leaving.value.code == 0

    def end(self, worker: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.workers()[worker], number)
        self.look_until(lambda: worker not in self.workers() or self.policy.failure)

    def changed(self, worker: int) -> str | None:
        environ = self.environments[worker]
        return HostChanges(environ).since(generation(environ))


class TrainingRehearsal(Rehearsal):
    """The same for scripts that call `fd.init()`."""

    def __init__(
        self,
        hosts: dict[str, int],
        *,
        restarts: int = 0,
        replace_stragglers: bool = False,
        **options: object,
    ) -> None:
        self.limits = {"restarts": restarts, "replace_stragglers": replace_stragglers}
        self.questions: dict[int, int] = {}
        super().__init__(hosts, **options)  # type: ignore[arg-type]

    def made_policy(self, job: ElasticJob, each: Job) -> Elastic:
        limits = TrainingLimits(each, **self.limits)  # type: ignore[arg-type]
        native = replace(job, training=limits)
        return ElasticTrainingPolicy(native, self.pool, self.rendezvous, self.discovery)

    def say(self, kind: str, *workers: int, step: int = 0) -> dict[int, Future[dict[str, Any]]]:
        """They ask for a rank, and say what they have."""
        asked = {}
        for worker in workers:
            number = self.questions[worker] = self.questions.get(worker, -1) + 1
            asked[worker] = self.voices.submit(
                ask_launcher, self.environment(worker), number, kind, PATIENCE, step
            )
        self.look_until(
            lambda: set(workers) & self.heard() == {w for w in workers if not asked[w].done()}
        )
        return asked

    def hear(self, asked: dict[int, Future[dict[str, Any]]]) -> dict[str, Any]:
        """The answer, which is the same for all but for the rank."""
        self.look_until(lambda: all(future.done() for future in asked.values()))
        answers = {worker: future.result() for worker, future in asked.items()}
        first = next(iter(answers.values()))
        for worker, answer in answers.items():
            assert answer["members"] == first["members"]
            assert answer["generation"] == first["generation"]
            if first["members"]:
                assert answer["members"][answer["rank"]] == worker
        return first

    def is_announced(self, number: int) -> bool:
        return HostChanges(self.environment(0)).since(number) is not None

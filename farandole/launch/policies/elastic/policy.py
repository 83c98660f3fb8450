"""The policy of an elastic job: forms one generation of workers after another.

At each tick it takes what has happened since the last one, and does the next thing:

    1  who has ended?              it was done, was to leave, or failed: then count the incident
    2  who is to be there?         `plan_generation`, from the hosts as they are now
    3  someone is missing          start it
    4  someone is too many         when it asks for a rank, let it go
    5  all of them ask for ranks   form the next generation
       else                        tell the running ones that there is something to come for
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from farandole.environment import ELASTIC_WORKER
from farandole.errors import LaunchError
from farandole.launch.job import Outcome
from farandole.launch.messages import tell
from farandole.launch.policies.base import Policy
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.generations import (
    GenerationPlan,
    Member,
    assign_ranks,
    plan_generation,
)
from farandole.launch.policies.elastic.host_blocklist import LIMIT, Incident
from farandole.launch.policies.elastic.job import ElasticJob
from farandole.launch.policies.elastic.late_workers import LateWorkers
from farandole.launch.policies.elastic.members import ElasticWorker, listed
from farandole.launch.policies.elastic.rendezvous_server import Question, RendezvousServer
from farandole.launch.policies.elastic.usable_hosts import UsableHosts
from farandole.launch.watches.exit_watch import ExitWatch, Overdue
from farandole.launch.worker_pool import WorkerPool
from farandole.worker.elastic import Change
from farandole.worker.failure import Failure, first_cause


class Elastic(Policy):
    """All workers of one job, over all its generations. `started` counts them."""

    wait_option = "--elastic-timeout"

    def __init__(
        self,
        job: ElasticJob,
        pool: WorkerPool,
        rendezvous: RendezvousServer,
        discovery: Discovery,
    ) -> None:
        self.exit_watch = ExitWatch(who="worker")
        self.failure: Failure | None = None
        self.lost: list[int] = []  # workers that failed when the training was done
        self.started = 0
        self._job = job
        self._pool = pool
        self._rendezvous = rendezvous
        self._hosts = UsableHosts(discovery, pool.reaches)
        self._late = LateWorkers(job)
        self._workers: dict[int, ElasticWorker] = {}  # those that run
        self._questions: dict[int, Question] = {}  # of those that ask for a rank
        self._waves = 0
        self._generation = -1
        self._life = 0  # how often the job has begun from nothing before
        self._failures: list[Failure] = []  # since the current generation was formed
        self._announced: Change | None = None
        self._had_state = False  # some worker, once
        self._is_over = False  # rank 0 is done, or all are

    def start(self) -> None:
        """The first tick starts them, if there are enough hosts."""

    def is_finished(self) -> bool:
        if self.failure is not None:
            return True
        return not self._workers and (self._is_over or self.done is not None)

    def on_exits(self, codes: Mapping[int, int]) -> None:
        ended = [(self._workers.pop(number), code) for number, code in codes.items()]
        for worker, code in ended:
            if worker.is_dismissed:
                continue  # its part was over
            if code == 0:
                self._note_done(worker)
            else:
                self._note_failure(worker, code)
        self._require_state()

    def on_overdue(self, workers: Sequence[Overdue]) -> None:
        """Their ends may take a moment, and are told of when they come."""
        for number, how in workers:
            worker = self._workers[number]
            if worker.held_up is not None:
                continue
            worker.held_up = how
            if worker.is_dismissed:  # what becomes of it is of no interest any more
                location = self._pool.locations()[number]
                tell(f"worker {number} ({location}) {how}, and is ended")
            self._pool.kill(number)

    def tick(self) -> None:
        """Raises `LaunchError` when the job cannot go on."""
        self._rendezvous.beat()
        asking = self._asking()
        self._require_state()
        if self.is_finished():
            return
        if self._is_over:
            self._dismiss(asking)
            self._end_newcomers()
            return
        # Of those with a rank: one that asks again has left the current generation. Newcomers alone
        # are no reason to end it at once; its members come when they commit.
        returning = any(
            self._is_first_time() or self._workers[number].rank is not None for number in asking
        )
        if self.done is not None and not returning:
            return  # the others are about to end as well
        plan = plan_generation(self._hosts.refresh(), self._members(), self._job.max_workers)
        is_enough = plan.size >= self._wanted() and self._keeps_state(plan)
        if not is_enough:
            self._wait_for_hosts(plan)
            if self.failure is not None or not self._keeps_state(plan):
                return
        else:
            self._hosts.note_enough()
            if plan.starting:
                self._start(plan.starting)
                return  # the next tick finds them among the members
        self._dismiss(asking & {member.worker for member in plan.leaving})
        self._end_late(plan, asking, someone_waits=returning)
        # All must ask before anyone is answered. Those who got a rank earlier would wait in a
        # collective for a member that still trains in the old generation.
        if is_enough and all(member.worker in asking for member in plan.staying):
            self._form(plan.staying)
        else:
            self._announce(plan, asking)

    def outcome(self, stopped_by: str | None) -> Outcome:
        failed = (self.failure.rank,) if self.failure else ()
        return Outcome(self.failure, failed, stopped_by, lost=tuple(sorted(self.lost)))

    def _asking(self) -> set[int]:
        """Who asks for a rank. Notes who of them has the state, if someone has it."""
        found = self._questions = self._rendezvous.asking(self._workers)
        self._had_state |= any(question.has_state for question in found.values())
        for number, question in found.items():
            self._workers[number].is_new = self._had_state and not question.has_state
        return set(found)

    def _is_first_time(self) -> bool:
        return self._generation < 0

    def _members(self) -> list[Member]:
        return [
            Member(worker.number, worker.host, None if worker.is_new else worker.rank)
            for worker in self._workers.values()
            if not worker.is_dismissed
        ]

    # Those that have ended.

    def _require_state(self) -> None:
        """Ends the job when no worker is left that has the state: others begin from nothing."""
        has_rank = any(member.rank is not None for member in self._members())
        if self._is_over or has_rank or self._is_first_time() or self.failure is not None:
            return
        if self._failures:
            tell(f"no worker of generation {self._generation} is left, and their state is lost")
            self.failure = first_cause(self._failures)
        else:
            self._is_over = True

    def _note_done(self, worker: ElasticWorker) -> None:
        self.done = worker.number
        if worker.rank == 0:
            self._is_over = True
        elif worker.rank is None:  # it never had one: it would do so again
            self._hosts.blocklist.note(worker.host, self._incident(worker))

    def _note_failure(self, worker: ElasticWorker, code: int) -> None:
        failure = self._pool.failure(worker.number, code, int(time.time()))
        if worker.held_up is not None:
            failure = failure.held_up_others(worker.held_up)
        self._pool.kill_children(worker.number)
        if self._is_over:
            self.lost.append(worker.number)
            tell(f"{worker.describe(failure)}, when rank 0 was done")
            return
        self._failures.append(failure)
        tell(f"{worker.describe(failure).rstrip('.')}{self._blame_host(worker)}")

    def _blame_host(self, worker: ElasticWorker) -> str:
        """Counts the failure against its host; returns what follows from it, to be told."""
        blocklist = self._hosts.blocklist
        if not self._is_first_time() and self._rendezvous.has_committed(self._generation):
            blocklist.forgive(self._generation)
        if blocklist.note(worker.host, self._incident(worker)):
            return f"; {worker.host} is left out: {LIMIT} times that without a commit in between"
        if blocklist.is_left_out(worker.host) or worker.host not in self._hosts.slots:
            return ""
        return self._replacement()

    def _replacement(self) -> str:
        """What is said of a lost worker's place."""
        return "; another takes its place"

    def _incident(self, worker: ElasticWorker) -> Incident:
        had_rank = worker.rank is not None
        return Incident(self._generation) if had_rank else Incident(self._generation, worker.wave)

    # Those that are to be there.

    def _wanted(self) -> int:
        wanted = self._job.workers if self._is_first_time() else None
        return self._job.min_workers if wanted is None else wanted

    def _keeps_state(self, plan: GenerationPlan) -> bool:
        """Whether one that has the state stays, if there is such a one."""
        return self._is_first_time() or any(member.rank is not None for member in plan.staying)

    def _wait_for_hosts(self, plan: GenerationPlan) -> None:
        left_out = self._hosts.left_out()
        if left_out and self._failures:
            tell(f"without {', '.join(left_out)} there are too few slots to go on")
            self.failure = first_cause(self._failures)
            return
        if self._hosts.seconds_too_few() < self._job.start_timeout_seconds:
            return
        reasons = [self._hosts.problem()]
        if not self._keeps_state(plan):
            reasons.append(
                f"all hosts of generation {self._generation} were removed at once, and the state "
                "with them; remove old hosts only when new ones take part"
            )
        raise LaunchError(
            f"{self._wanted()} workers are needed, and in {self._job.start_timeout_seconds:g} s "
            f"there were slots for {plan.size} (hosts: {listed(self._hosts.slots)})"
            f"{''.join(f'; {reason}' for reason in reasons if reason)}. Check the host discovery; "
            f"{self.wait_option} allows more time."
        )

    def _start(self, starting: Mapping[str, int]) -> None:
        self._waves += 1
        for host, count in starting.items():
            for _ in range(count):
                number = self.started
                self.started += 1
                self._rendezvous.expect(number)
                # Hosts count as the discovery calls them.
                variables = {ELASTIC_WORKER: str(number), "HOROVOD_HOSTNAME": host}
                self._pool.start(number, host, self._hosts.slots[host], variables)
                worker = ElasticWorker(number, host, self._waves, time.monotonic())
                self._workers[number] = worker

    # Those that are there.

    def _dismiss(self, workers: Iterable[int]) -> None:
        for number in workers:
            self._workers[number].is_dismissed = True
            self._rendezvous.dismiss(number)

    def _end_newcomers(self) -> None:
        """They have never had a part, and have nothing to save."""
        for worker in self._workers.values():
            if worker.rank is None and not worker.is_dismissed:
                worker.is_dismissed = True
                self._pool.kill(worker.number)

    def _end_late(self, plan: GenerationPlan, asking: set[int], *, someone_waits: bool) -> None:
        """Ends those that others wait for in vain; then they count as failed, and are replaced."""
        staying = [self._workers[member.worker] for member in plan.staying]
        awaited = [each for each in staying if each.number not in asking and each.held_up is None]
        locations = self._pool.locations()
        self.on_overdue(self._late.look(awaited, locations, someone_waits=someone_waits))

    def _form(self, members: Sequence[Member]) -> None:
        limit = self._job.reset_limit
        if limit is not None and self._generation >= limit:
            raise LaunchError(
                f"the workers change for the {limit + 1}. time, and the limit is {limit}. "
                "--reset-limit allows more."
            )
        self._generation += 1
        admits = any(self._workers[member.worker].is_new for member in members)
        for worker in self._workers.values():
            worker.rank = None
            worker.is_new = False  # until it says so itself
            worker.is_named = False
        placements = assign_ranks(members)
        for placement in placements:
            self._workers[placement.worker].rank = placement.rank
        self._rendezvous.assign(self._generation, placements, admits=admits, life=self._life)
        if self._generation:
            hosts: dict[str, int] = {}
            for member in members:
                hosts[member.host] = hosts.get(member.host, 0) + 1
            size = len(placements)
            tell(
                f"generation {self._generation}: {size} worker{'s' * (size > 1)} on "
                f"{listed(hosts)}; rank 0 is worker {placements[0].worker}"
            )
        # A generation that was formed has survived them: later failures have other causes.
        self._failures.clear()
        self._announced = None
        self.done = None
        self._late.reset()

    def _announce(self, plan: GenerationPlan, asking: set[int]) -> None:
        new = {member.worker for member in plan.staying if member.rank is None}
        removed = any(member.rank is not None for member in plan.leaving)
        if self._is_first_time() or not (removed or (new and new <= asking)):
            return
        change: Change = "added" if new else "removed"
        # Newcomers are announced only when all of them ask, so that a running job does not
        # interrupt itself to wait for processes that still import torch.
        if change != self._announced:
            self._rendezvous.announce(self._generation, change)
            self._announced = change

"""The policy of an elastic job whose scripts call `fd.init()`: the survivors do not wait.

It differs from `policy`, where workers restore their last commit, in what a loss means:

    a worker is lost          the survivors are in the middle of a step, and say so. They form the
                              next generation among themselves, at once, and finish the step
    its replacement           is started meanwhile. It is promised a rank, runs its script up to
                              the training, and asks again when it is ready
    it is ready               the running ones are told. They come between two steps, and the next
                              generation is of all
    fewer than `min_workers`  the survivors wait, until enough replacements are ready
    nobody is left            all are started again: their scripts go on from the last checkpoint
                              if they load one, or else from the beginning
    a host is lost            all its workers are. Others are started on hosts with room, or there
                              when it answers again
    a host is removed         its workers leave between two steps

A job begins with `workers`, and then grows to `max_workers`. Each start beyond these, and beyond
one for each slot that is added later, takes one of the job's restarts. The same exception in two
workers without progress between them ends the job: a replacement would meet it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farandole.launch.hosts import HERE
from farandole.launch.job import Outcome
from farandole.launch.messages import tell
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.generations import (
    GenerationPlacement,
    GenerationPlan,
    Member,
)
from farandole.launch.policies.elastic.job import ElasticJob
from farandole.launch.policies.elastic.members import ElasticWorker
from farandole.launch.policies.elastic.policy import Elastic
from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
from farandole.launch.policies.elastic.repeated_exceptions import RepeatedExceptions
from farandole.launch.policies.elastic.restarts import Restarts
from farandole.launch.policies.elastic.stragglers import SLOW, Stragglers
from farandole.launch.policies.elastic.training_plan import plan_training
from farandole.launch.policies.elastic.usable_hosts import UsableHosts
from farandole.launch.watches.exit_watch import Overdue
from farandole.launch.worker_pool import WorkerPool
from farandole.worker.elastic import BROKEN
from farandole.worker.failure import first_cause, signal_obeyed_by

_BLOCKED_SECONDS = 60.0  # for which a host on which workers keep failing is left out at first


class ElasticTrainingPolicy(Elastic):
    """All workers of one job, over all its generations."""

    wait_option = "--elastic-wait"

    def __init__(
        self,
        job: ElasticJob,
        pool: WorkerPool,
        rendezvous: RendezvousServer,
        discovery: Discovery,
    ) -> None:
        super().__init__(job, pool, rendezvous, discovery)
        assert job.training is not None
        self._limits = job.training
        self._hosts = UsableHosts(discovery, pool.reaches, job.admission, _BLOCKED_SECONDS)
        self._cut_off: set[int] = set()  # workers whose hosts were lost
        self._rank0_host: str | None = None
        self._restarts = Restarts(job.training.restarts)
        self._has_begun = False  # the generation under way has, or had, the state
        self._free_starts = job.workers or job.min_workers
        self._step = 0  # that survivors were in when they last asked
        self._raised = RepeatedExceptions()
        self._stopped_by: str | None = None  # a signal that workers have obeyed
        self._stragglers = Stragglers(rendezvous)

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
        if self.done is not None and not self._survivors(asking):
            return  # the others are about to end as well
        self._promise()
        plan = self._start_allowed(self._plan())
        self._require_enough(plan)
        if self.failure is not None:
            return
        self._dismiss(asking & {member.worker for member in plan.leaving})
        self._go_on(plan, set(self._questions))
        self._look_at_stragglers()

    def _asking(self) -> set[int]:
        found = super()._asking()
        steps = [question.step for question in self._questions.values() if question.has_state]
        self._step = max([self._step, *steps])
        return found

    def _is_first_time(self) -> bool:
        return not self._has_begun

    def _survivors(self, numbers: set[int]) -> set[int]:
        return {n for n in numbers if self._has_rank(self._workers[n])}

    @staticmethod
    def _has_rank(worker: ElasticWorker) -> bool:
        return worker.rank is not None and not worker.is_new

    # Starting

    def _promise(self) -> None:
        """Tells new workers of a job that has begun a rank, and how many there will be."""
        if self._is_first_time():
            return
        for number in list(self._questions):
            worker = self._workers[number]
            if worker.is_promised or self._has_rank(worker):
                continue
            size = sum(not each.is_dismissed for each in self._workers.values())
            placement = GenerationPlacement(number, size - 1, max(size, 2), 0, max(size, 2))
            self._rendezvous.promise(self._generation, placement, self._life)
            worker.is_promised = True
            del self._questions[number]

    def _plan(self) -> GenerationPlan:
        self._hosts.refresh()
        members = self._members()
        if added := self._hosts.take_added_slots():
            # Workers for them replace nobody, and take no restart.
            here = sum(member.host in self._hosts.slots for member in members)
            most = self._job.max_workers or added + here
            self._free_starts += max(0, min(added, most - here - self._free_starts))
        return plan_training(
            self._hosts.slots,
            members,
            left_out=self._hosts.left_out(),
            ready={n for n in self._questions if not self._has_rank(self._workers[n])},
            min_workers=self._job.min_workers,
            max_workers=self._job.workers if self._is_first_time() else self._job.max_workers,
        )

    def _start_allowed(self, plan: GenerationPlan) -> GenerationPlan:
        """Starts what is missing, as far as it may; returns the plan without those that may not."""
        wanted = sum(plan.starting.values())
        if not wanted:
            return plan
        allowed = min(wanted, self._free_starts)
        self._free_starts -= allowed
        allowed += self._restarts.take(wanted - allowed)
        starting: dict[str, int] = {}
        for host, count in plan.starting.items():
            starting[host] = min(count, allowed)
            allowed -= starting[host]
        self._start({host: count for host, count in starting.items() if count})
        return self._plan()

    def _require_enough(self, plan: GenerationPlan) -> None:
        """Ends the job when there are too few workers, and no more can come."""
        coming = min(sum(plan.starting.values()), self._free_starts + self._restarts.left)
        total = len(plan.staying) + coming
        if total >= self._job.min_workers:
            self._hosts.note_enough()
            return
        if self._failures and not self._restarts.left and not self._free_starts:
            tell(
                f"{total} worker{'s are' if total != 1 else ' is'} left, --min is "
                f"{self._job.min_workers}, and all {self._restarts.most} restarts are used up"
            )
            self.failure = first_cause(self._failures)
            return
        self._wait_for_hosts(plan)

    def _wait_for_hosts(self, plan: GenerationPlan) -> None:
        """A host that is left out now may be there again soon."""
        if self._hosts.seconds_too_few() < self._job.start_timeout_seconds:
            return
        if not self._failures:
            super()._wait_for_hosts(plan)
            return
        left_out = ", ".join(self._hosts.left_out())
        tell(
            f"workers left: {len(plan.staying)}, --min is {self._job.min_workers}, and in "
            f"{self._job.start_timeout_seconds:g} s ({self.wait_option}) no host took others"
            + (f"; left out: {left_out}" if left_out else "")
        )
        self.failure = first_cause(self._failures)

    # Going on

    def _go_on(self, plan: GenerationPlan, asking: set[int]) -> None:
        if self._is_first_time():
            all_ask = all(member.worker in asking for member in plan.staying)
            if plan.staying and all_ask and len(plan.staying) >= self._first_size(plan):
                self._has_begun = True
                self._may_grow()
                self._form(plan.staying)
            return
        survivors = [m for m in plan.staying if m.rank is not None]
        new = [m for m in plan.staying if m.rank is None and m.worker in asking]
        returned = self._survivors(asking)
        leaving = [m for m in plan.leaving if m.rank is not None]
        # Those that leave, too, must have asked: they would take part in the next generation's
        # collectives otherwise, or ask for a rank in it.
        awaited = [
            self._workers[m.worker] for m in (*survivors, *leaving) if m.worker not in asking
        ]
        if not awaited and survivors:
            self._form_from([m for m in plan.staying if m in survivors or m in new])
            return
        late = [worker for worker in awaited if worker.held_up is None]
        locations = self._pool.locations()
        self.on_overdue(self._late.look(late, locations, someone_waits=bool(returned)))
        if (new or leaving) and not returned and self._announced is None:
            self._announced = "added" if new else "removed"
            self._rendezvous.announce(self._generation, self._announced)

    def _may_grow(self) -> None:
        """Workers beyond those that the job begins with replace nobody, and take no restart."""
        if self._life == 0 and self._job.max_workers and self._job.workers:
            most = min(self._job.max_workers, sum(self._hosts.slots.values()))
            self._free_starts += max(0, most - self._job.workers)

    def _first_size(self, plan: GenerationPlan) -> int:
        """All that were asked for; when no more can come, as many as are needed."""
        wanted = self._job.workers or self._job.min_workers
        can_come = min(sum(plan.starting.values()), self._free_starts + self._restarts.left)
        return wanted if len(plan.staying) + can_come >= wanted else self._job.min_workers

    def _form_from(self, ready: Sequence[Member]) -> None:
        """All that have the state ask, and `ready` are they and the new ones that ask, in the order
        of their ranks. Those in the middle of a step finish it by themselves."""
        if len(ready) < self._job.min_workers:
            return  # replacements are on their way; `_require_enough` watches the time
        if self._ends_by_repetition():
            return
        survivors = [member for member in ready if member.rank is not None]
        are_broken = any(self._questions[member.worker].kind == BROKEN for member in survivors)
        self._form(survivors if are_broken else ready)

    def _form(self, members: Sequence[Member]) -> None:
        super()._form(members)
        host = members[0].host
        if host != self._rank0_host and (self._rank0_host is not None or host != HERE):
            tell(f"rank 0 is on host {host}: what the run logs and saves from here on is there")
        self._rank0_host = host

    # Those that have ended

    def on_exits(self, codes: Mapping[int, int]) -> None:
        """All that leave by themselves on a signal that tells them to save have stopped the job."""
        for number, code in codes.items():
            failure = self._pool.failure(number, code, 0) if code else None
            obeyed = None if failure is None else signal_obeyed_by([failure])
            if obeyed is not None and not self._workers[number].is_dismissed:
                self._stopped_by = obeyed
                self._is_over = True
                self._workers[number].is_dismissed = True
        super().on_exits(codes)

    def outcome(self, stopped_by: str | None) -> Outcome:
        return super().outcome(stopped_by or self._stopped_by)

    def _note_failure(self, worker: ElasticWorker, code: int) -> None:
        # All workers of a host that is lost are one failure: others need not wait long for them.
        is_known = worker.host in self._hosts.left_out() and self._is_cut_off(worker)
        super()._note_failure(worker, code)
        if not is_known:
            self._restarts.note_failure()
        if self._failures and self._failures[-1].is_not_elastic:
            self.failure = self._failures[-1]  # of all workers alike, before the training
        if worker.rank is not None:
            self._rendezvous.tell_lost(self._generation)

    def _blame_host(self, worker: ElasticWorker) -> str:
        if self._is_cut_off(worker):
            assert self._hosts.admission is not None
            self._cut_off.add(worker.number)
            return self._hosts.admission.lost(worker.host)
        # Where there is no other host, restarts and their pauses are limit enough.
        if len(self._hosts.slots) == 1:
            return self._replacement()
        said = super()._blame_host(worker)
        pause = self._hosts.blocklist.pause_seconds(worker.host)
        if pause is not None and self._hosts.blocklist.is_left_out(worker.host):
            return f"; {worker.host} is left out for {pause:g} s: workers keep failing there"
        return said

    def _is_cut_off(self, worker: ElasticWorker) -> bool:
        return self._hosts.admission is not None and self._pool.is_host_lost(worker.number)

    def _replacement(self) -> str:
        if self._restarts.left:
            number = self._restarts.most - self._restarts.left + 1
            return f"; another takes its place ({number} of {self._restarts.most} restarts)"
        return "; no restart is left for another" if self._restarts.most else ""

    def _ends_by_repetition(self) -> bool:
        """Asked when the survivors of exceptions have said which step they are in, or there are
        none."""
        for failure in self._failures:
            of_script = failure.rank not in self._cut_off
            if of_script and self._raised.is_repeated(failure, self._step):
                tell("two workers failed in the same way without progress: others would, too")
                self.failure = failure
                return True
        return False

    def _require_state(self) -> None:
        """When nobody is left that has the state, all begin anew."""
        if self._is_over or self.failure is not None:
            return
        if self._is_first_time():
            self._ends_by_repetition()  # such as a script that cannot be imported
            return
        if any(self._has_rank(worker) for worker in self._workers.values()):
            return
        if not self._failures:
            self._is_over = True
            return
        if self._ends_by_repetition():
            return
        wanted = self._job.workers or self._job.min_workers
        if self._restarts.left < min(wanted, self._job.min_workers):
            tell(
                f"no worker of generation {self._generation} is left, and their state is lost; "
                f"of {self._restarts.most} restarts {self._restarts.left} are left"
            )
            self.failure = first_cause(self._failures)
            return
        tell(
            "no worker is left that has the state: all are started again, and go on from the last "
            "checkpoint if the script loads one, or else from the beginning"
        )
        self._begin_anew()

    def _begin_anew(self) -> None:
        for worker in self._workers.values():
            worker.is_dismissed = True
            self._pool.kill(worker.number)
        self._has_begun = self._had_state = False
        self._life += 1
        self._failures.clear()

    # Stragglers

    def _look_at_stragglers(self) -> None:
        number = self._stragglers.new_one(self._generation) if self._has_begun else None
        if number is None or number not in self._workers:
            return
        location = self._pool.locations()[number]
        if self._limits.replace_stragglers and self._restarts.left:
            tell(f"worker {number} ({location}) {SLOW}, and is replaced")
            self.on_overdue([Overdue(number, SLOW)])
        else:
            tell(f"worker {number} ({location}) {SLOW}; --replace-stragglers replaces it")

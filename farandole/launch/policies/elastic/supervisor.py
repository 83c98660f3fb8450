"""The workers of an elastic job, as the launcher sees them: `look_after` them, again and again.

Each look takes what has happened since the last one, and does the next thing:

    1  who has ended?              it was done, was to leave, or failed: then count the incident
    2  who is to be there?         `plan_generation`, from the hosts as they are now
    3  someone is missing          start it
    4  someone is too many         when it asks for a seat, let it go
    5  all of them ask for seats   form the next generation
       else                        tell the running ones that there is something to come for
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.errors import LaunchError
from farandole.launch.exit_watch import ExitWatch, Where
from farandole.launch.job_directory import JobDirectory
from farandole.launch.output import Relay
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.generations import (
    GenerationPlan,
    Member,
    places,
    plan_generation,
)
from farandole.launch.policies.elastic.host_blocklist import LIMIT, HostBlocklist, Incident
from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
from farandole.launch.policies.elastic.starting import Running, Starter, stop_all
from farandole.launch.processes import tell
from farandole.system.process_state import is_stopped
from farandole.worker.elastic import Change
from farandole.worker.failure import Failure, first_cause

if TYPE_CHECKING:
    from farandole.launch.policies.elastic.job import ElasticJob

_STOPPED_SECONDS = 3.0  # that others have waited for a stopped worker, before it is ended
_NAMED_SECONDS = 5.0
_NEW_NAMED_SECONDS = 60.0


@dataclass
class _Worker:
    number: int
    host: str
    process: Running
    wave: int  # which look it was started in
    since: float  # when it was started, or seated
    rank: int | None = None  # in the current generation
    newborn: bool = False  # it has had a seat, perhaps, but has not got the state from the others
    dismissed: bool = False
    named: bool = False  # as one that the others wait for
    held_up: str | None = None  # how it did so to the others, and was ended

    @property
    def where(self) -> Where:
        return Where(self.process.pid, self.host)


class ElasticSupervisor:
    """All workers of one job, over all its generations."""

    def __init__(
        self,
        job: ElasticJob,
        place: JobDirectory,
        relay: Relay,
        reception: RendezvousServer,
        starter: Starter,
        discovery: Discovery,
    ) -> None:
        self.failure: Failure | None = None
        self.lost: list[int] = []  # workers that failed when the training was done
        self._job = job
        self._place = place
        self._relay = relay
        self._reception = reception
        self._starter = starter
        self._discovery = discovery
        self._running: dict[int, _Worker] = {}
        self._started = 0  # workers, so far
        self._waves = 0
        self._generation = -1
        self._failures: list[Failure] = []  # since the current generation was formed
        self._strikes = HostBlocklist()
        self._found: Mapping[str, int] = {}  # hosts
        self._hosts: Mapping[str, int] = {}  # those of them that can be used
        self._announced: Change | None = None
        self._had_state = False  # some worker, once
        self._done: int | None = None  # a worker of this generation that ended with 0
        self._exits = ExitWatch(who="worker")
        self._over = False
        self._too_few_since: float | None = None
        self._asked_since: float | None = None

    def is_at_work(self) -> bool:
        if self.failure is not None:
            return False
        return bool(self._running) or not (self._over or self._done is not None)

    def look_after(self) -> None:
        """Raises `LaunchError` when the job cannot go on."""
        self._reception.beat()
        self._notice_ends()
        if self.failure is not None or not self.is_at_work():
            return
        self._end_overdue()
        asking = self._asking()
        if self._over:
            self._dismiss(asking)
            self._end_newcomers()
            return
        returning = any(
            self._is_first_time() or self._running[number].rank is not None for number in asking
        )
        if self._done is not None and not returning:
            return  # the others are about to end as well
        self._notice_hosts()
        plan = plan_generation(
            self._strikes.usable(self._hosts), self._members(), self._job.max_workers
        )
        enough = self._is_enough(plan)
        if not enough:
            self._wait_for_hosts(plan)
            if self.failure is not None or not self._keeps_state(plan):
                return
        else:
            self._too_few_since = None
            if plan.starting:
                self._start(plan.starting)
                return  # the next look finds them among the members
        self._dismiss(asking & {member.worker for member in plan.leaving})
        self._require_punctuality(plan, asking, returning)
        if enough and all(member.worker in asking for member in plan.staying):
            self._form(plan)
        else:
            self._announce(plan, asking)

    def stop(self) -> None:
        stop_all([worker.process for worker in self._running.values()])

    def _asking(self) -> set[int]:
        """Who asks for a seat. Notes who of them has the state, if someone has it."""
        found = self._reception.asking(self._running)
        self._had_state |= any(found.values())
        for number, has_state in found.items():
            self._running[number].newborn = self._had_state and not has_state
        return set(found)

    def _is_first_time(self) -> bool:
        return self._generation < 0

    def _members(self) -> list[Member]:
        return [
            Member(worker.number, worker.host, None if worker.newborn else worker.rank)
            for worker in self._running.values()
            if not worker.dismissed
        ]

    # Those that have ended.

    def _notice_ends(self) -> None:
        ended = []
        for number, worker in list(self._running.items()):
            code = worker.process.poll()
            if code is not None:
                del self._running[number]
                ended.append((worker, code))
        for worker, code in ended:
            if worker.dismissed:
                continue  # its part was over
            if code == 0:
                self._notice_done(worker)
            else:
                self._notice_failure(worker, code)
        seated = any(member.rank is not None for member in self._members())
        if self._over or seated or self._is_first_time():
            return
        if self._failures:
            tell(f"nobody of generation {self._generation} is left, and with them went the state")
            self.failure = first_cause(self._failures)
        else:
            self._over = True

    def _notice_done(self, worker: _Worker) -> None:
        self._done = worker.number
        if worker.rank == 0:
            self._over = True
        elif worker.rank is None:  # without a seat: it would do so again
            self._strikes.note(worker.host, self._incident(worker))

    def _notice_failure(self, worker: _Worker, code: int) -> None:
        failure = self._place.failure(worker.number, code, int(time.time()))
        if worker.held_up is not None:
            failure = failure.held_up_others(worker.held_up)
        self._place.kill(worker.number)  # its children
        if self._over:
            self.lost.append(worker.number)
            tell(f"{_described(worker, failure)}, when rank 0 was done")
            return
        self._failures.append(failure)
        if not self._is_first_time() and self._reception.has_committed(self._generation):
            self._strikes.forgive(self._generation)
        if self._strikes.note(worker.host, self._incident(worker)):
            rest = f"; {worker.host} is left out: {LIMIT} times that without a commit in between"
        elif self._strikes.is_left_out(worker.host) or worker.host not in self._hosts:
            rest = ""
        else:
            rest = "; another takes its place"
        tell(f"{_described(worker, failure)}{rest}")

    def _incident(self, worker: _Worker) -> Incident:
        seated = worker.rank is not None
        return Incident(self._generation) if seated else Incident(self._generation, worker.wave)

    # Those that are to be there.

    def _notice_hosts(self) -> None:
        found = self._discovery.hosts
        if found is None or found == self._found:
            return
        if self._found:
            tell(f"the hosts are now {_listed(found)}; they were {_listed(self._found)}")
        self._found = found
        self._hosts = {host: slots for host, slots in found.items() if self._starter.reaches(host)}
        if len(self._hosts) < len(found):
            tell(
                f"{', '.join(found.keys() - self._hosts.keys())}: not used, because the job began "
                "on this host alone and listens on nothing else; with --network-interface it does"
            )

    def _is_enough(self, plan: GenerationPlan) -> bool:
        return plan.size >= self._wanted() and self._keeps_state(plan)

    def _wanted(self) -> int:
        wanted = self._job.workers if self._is_first_time() else None
        return self._job.min_workers if wanted is None else wanted

    def _keeps_state(self, plan: GenerationPlan) -> bool:
        """Whether one that has the state stays, if there is such a one."""
        return self._is_first_time() or any(member.rank is not None for member in plan.staying)

    def _wait_for_hosts(self, plan: GenerationPlan) -> None:
        left_out = [host for host in self._hosts if self._strikes.is_left_out(host)]
        if left_out and self._failures:
            tell(f"without {', '.join(left_out)} there are too few slots to go on")
            self.failure = first_cause(self._failures)
            return
        now = time.monotonic()
        if self._too_few_since is None:
            self._too_few_since = now
        if now - self._too_few_since < self._job.start_timeout_seconds:
            return
        reasons = []
        if self._discovery.error is not None:
            reasons.append(f"the last question for hosts failed ({self._discovery.error})")
        if not self._keeps_state(plan):
            reasons.append(
                f"all hosts of generation {self._generation} were removed at once, and the state "
                "with them; remove old hosts only when new ones take part"
            )
        raise LaunchError(
            f"{self._wanted()} workers are needed, and in {self._job.start_timeout_seconds:g} s "
            f"there were slots for {plan.size} (hosts: {_listed(self._hosts)})"
            f"{''.join(f'; {reason}' for reason in reasons)}. Check the host discovery; "
            "--elastic-timeout allows more time."
        )

    def _start(self, starting: Mapping[str, int]) -> None:
        self._waves += 1
        for host, count in starting.items():
            for _ in range(count):
                number = self._started
                self._started += 1
                self._reception.expect(number)
                process = self._starter.start(host, self._hosts[host], number)
                self._relay.follow(self._place.sources_of(number))
                worker = _Worker(number, host, process, self._waves, time.monotonic())
                self._running[number] = worker

    # Those that are there.

    def _dismiss(self, workers: Iterable[int]) -> None:
        for number in workers:
            self._running[number].dismissed = True
            self._reception.dismiss(number)

    def _end_newcomers(self) -> None:
        """They have never had a part, and have nothing to save."""
        for worker in self._running.values():
            if worker.rank is None and not worker.dismissed:
                worker.dismissed = True
                worker.process.kill()

    def _require_punctuality(
        self, plan: GenerationPlan, asking: set[int], someone_waits: bool
    ) -> None:
        """Ends those that others wait for in vain; then they count as failed, and are replaced."""
        now = time.monotonic()
        if not someone_waits:
            self._asked_since = None
        elif self._asked_since is None:
            self._asked_since = now
        waited = 0.0 if self._asked_since is None else now - self._asked_since
        for member in plan.staying:
            worker = self._running[member.worker]
            if worker.number in asking or worker.held_up is not None:
                continue
            limit, late, patience = self._job.start_timeout_seconds, waited, _NAMED_SECONDS
            if worker.rank is not None:
                limit = min(limit, self._job.answer_seconds)
            else:  # it may have much to import
                late, patience = now - worker.since, _NEW_NAMED_SECONDS
            pid = worker.process.pid
            if waited > _STOPPED_SECONDS and pid is not None and is_stopped(pid):
                self._end(worker, "was stopped (SIGSTOP), and did not ask for its seat")
            elif late > limit:
                self._end(worker, f"did not ask for its seat within {limit:g} s")
            elif waited > patience and not worker.named:
                worker.named = True
                tell(
                    f"waiting for worker {worker.number} ({worker.where}, running) to ask for its "
                    f"seat; it is ended after {limit:g} s"
                )

    def _end_overdue(self) -> None:
        """Ends those that run on when another is done."""
        running = {
            number: worker.where
            for number, worker in self._running.items()
            if worker.held_up is None
        }
        for number, how in self._exits.look(running, self._done):
            self._end(self._running[number], how)

    def _end(self, worker: _Worker, how: str) -> None:
        """Its end may take a moment, and is told of when it comes."""
        worker.held_up = how
        if worker.dismissed:  # what becomes of it is of no interest any more
            tell(f"worker {worker.number} ({worker.where}) {how}, and is ended")
        worker.process.kill()

    def _form(self, plan: GenerationPlan) -> None:
        limit = self._job.reset_limit
        if limit is not None and self._generation >= limit:
            raise LaunchError(
                f"the workers change for the {limit + 1}. time, and the limit is {limit}. "
                "--reset-limit allows more."
            )
        self._generation += 1
        for worker in self._running.values():
            worker.rank = None
            worker.newborn = False  # until it says so itself
            worker.named = False
        seats = places(plan.staying)
        for seat in seats:
            self._running[seat.worker].rank = seat.rank
        self._reception.seat(self._generation, seats)
        if self._generation:
            hosts: dict[str, int] = {}
            for member in plan.staying:
                hosts[member.host] = hosts.get(member.host, 0) + 1
            tell(
                f"generation {self._generation}: {len(seats)} worker{'s' * (len(seats) > 1)} on "
                f"{_listed(hosts)}; "
                f"rank 0 is worker {seats[0].worker}"
            )
        self._failures.clear()
        self._announced = None
        self._done = None
        self._asked_since = None

    def _announce(self, plan: GenerationPlan, asking: set[int]) -> None:
        new = {member.worker for member in plan.staying if member.rank is None}
        removed = any(member.rank is not None for member in plan.leaving)
        if self._is_first_time() or not (removed or (new and new <= asking)):
            return
        change: Change = "added" if new else "removed"
        if change != self._announced:
            self._reception.announce(self._generation, change)
            self._announced = change


def _listed(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{host}:{slots}" for host, slots in hosts.items()) or "none"


def _described(worker: _Worker, failure: Failure) -> str:
    seat = "before its first seat" if worker.rank is None else f"rank {worker.rank}"
    said = str(failure).partition(" ")[2].partition(" ")[2]
    return f"worker {worker.number} on {worker.host} ({seat}) {said}"

"""Runs an elastic job: workers die, hosts come and go, and the training goes on.

The launcher starts the workers, and forms one generation of them after another. `generations`
decides who sits where, `reception` tells them, `rejoining` is their side. When a worker ends:

    rank 0, with 0                the training is done; the others may end, and nobody is started
    another, with 0               it is done; its seat stays empty while nobody asks for a new one
    in any other way              it is replaced on its host, and a new generation is formed when
                                  the others have noticed and ask for their seats
    the last of a generation,     the job has failed: nobody is left who has the state
      in any other way

A worker that is stuck does not end. The others notice when a collective breaks, and ask for their
seats. One that does not ask then is named, and ended: soon if it is stopped (SIGSTOP), or else
after `answer_seconds`. It counts as one that failed. When rank 0 is done, the others have as long
to end as `exit_watch` says.

A host that was added gets workers, which wait; when they are ready the running ones are told, and
come at their next commit. A host that was removed loses its workers at the next commit. With fewer
than `min_workers` the job waits for hosts, and after `start_timeout_seconds` it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from farandole.environment import ELASTIC_WORKER
from farandole.errors import UserError
from farandole.launch.backends.ssh.start import Ssh
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.output import Relay
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
from farandole.launch.policies.elastic.starting import Starter
from farandole.launch.policies.elastic.supervisor import ElasticSupervisor
from farandole.worker.network import address_for, is_here
from farandole.worker.signals import signals_noted
from farandole.worker.store.hosted import LOOPBACK, JobStore

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ElasticJob:
    """A script to run on as many workers as there are slots, from `min_workers` to `max_workers`.

    `discover` says how many slots each host has now, in order; it is called about once a second.
    The job begins when there are slots for `workers`, or else for `min_workers`. After
    `reset_limit` changes of workers one more makes it fail.
    """

    command: Sequence[str]  # what follows `python`: a script and its arguments, or -m module …
    min_workers: int
    max_workers: int | None
    discover: Callable[[], Mapping[str, int]]
    workers: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    reset_limit: int | None = None
    start_timeout_seconds: float = 600.0
    answer_seconds: float = 150.0  # for a seat to be asked for, once another has: collectives break
    whole_command: bool = False  # `command` begins with the program itself, not with a script
    ssh: Ssh = field(default_factory=Ssh)  # how hosts other than this one are reached
    interfaces: Sequence[str] = ()  # that all hosts share, if the system shall not choose

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise UserError(f"min_workers={self.min_workers}: a job needs 1 worker or more.")
        most = self.min_workers if self.max_workers is None else self.max_workers
        if most < self.min_workers:
            raise UserError(f"max_workers={most} is less than min_workers={self.min_workers}.")
        wanted = self.min_workers if self.workers is None else self.workers
        if wanted < self.min_workers or (self.max_workers is not None and wanted > most):
            raise UserError(
                f"workers={wanted} is not between min_workers={self.min_workers} and "
                f"max_workers={self.max_workers}."
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise UserError(f"reset_limit={self.reset_limit}: it is 0 or more.")
        if not self.start_timeout_seconds > 0:
            raise UserError(f"start_timeout_seconds={self.start_timeout_seconds} is no time.")
        if not self.answer_seconds > 0:
            raise UserError(f"answer_seconds={self.answer_seconds} is no time.")


def launch_elastic(job: ElasticJob) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens.

    Raises `LaunchError` when there are too few hosts, or more changes than `reset_limit`, and what
    the first call of `discover` raises.
    """
    discovery = Discovery(job.discover)
    discovery.start()
    others = [host for host in discovery.hosts or () if not is_here(host)]
    # Where the user has named other hosts, or an interface that they share, they can reach us.
    known = bool(others or job.interfaces)
    address = address_for(others, job.interfaces) if known else LOOPBACK
    shared_by = job.max_workers or job.workers or job.min_workers
    place = JobDirectory(
        Job(shared_by, job.command, job.environment),
        ELASTIC_WORKER,
        here=shared_by if known else None,
    )
    relay = Relay(())
    store = JobStore(place.folder, address)
    reception = RendezvousServer(store)
    starter = Starter(
        place,
        job.command,
        job.environment,
        whole_command=job.whole_command,
        address=address,
        store=store,
        alone=not known,
        ssh=job.ssh,
    )
    troupe = ElasticSupervisor(job, place, relay, reception, starter, discovery)
    kept = False
    with signals_noted() as received:
        relay.start()
        try:
            while troupe.is_at_work() and not received:
                troupe.look_after()
                time.sleep(_POLL_SECONDS)
            stopped_by = received[0] if troupe.is_at_work() else None
            kept = stopped_by is None and bool(troupe.failure or troupe.lost)
        finally:
            discovery.stop()
            troupe.stop()
            place.reap()
            relay.stop()
            store.close()
            place.close(keep_logs=kept)
    return Outcome(
        troupe.failure,
        (troupe.failure.rank,) if troupe.failure else (),
        stopped_by,
        place.folder if kept else None,
        tuple(sorted(troupe.lost)),
    )

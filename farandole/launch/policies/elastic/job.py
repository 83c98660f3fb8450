"""An elastic job: workers die, hosts come and go, and the training goes on.

The launcher starts the workers, and forms one generation of them after another. `generations`
assigns the ranks, `rendezvous_server` tells them to the workers, `worker.elastic` is the workers'
side, and `policy` decides what happens when. When a worker ends:

    rank 0, with 0                the training is done; the others may end, and nobody is started
    another, with 0               it is done; its rank stays free while nobody asks for a new one
    in any other way              it is replaced on its host, and a new generation is formed when
                                  the others have noticed and ask for new ranks
    the last of a generation,     the job has failed: nobody is left who has the state
      in any other way

A worker that is stuck does not end. The others notice when a collective breaks, and ask for new
ranks. One that does not ask then is named, and ended: soon if it is stopped (SIGSTOP), or else
after `answer_seconds`. It counts as one that failed. When rank 0 is done, the others have as long
to end as `exit_watch` says.

A host that was added gets workers, which wait; when they are ready the running ones are told, and
come at their next commit. A host that was removed loses its workers at the next commit. With fewer
than `min_workers` the job waits for hosts, and after `start_timeout_seconds` it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from farandole.environment import ELASTIC_MOST
from farandole.errors import UserError
from farandole.launch.backends.remote.backend import CONNECT_SECONDS, SILENCE_SECONDS
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.job import Job
from farandole.launch.policies.elastic.usable_hosts import Admission


@dataclass(frozen=True)
class TrainingLimits:
    """Of a job whose scripts call `fd.init()`, not `hvd.init()`: see `training_policy`."""

    base: Job  # what each worker runs, and how
    restarts: int  # workers that may be started again, over the whole job
    replace_stragglers: bool = False

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise UserError(f"restarts={self.restarts}: it is 0 or more.")


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
    answer_seconds: float = 150.0  # to ask for a rank, once another has: collectives break
    whole_command: bool = False  # `command` begins with the program itself, not with a script
    channel: Channel = field(default_factory=Ssh)  # how hosts other than this one are reached
    connect_seconds: float = CONNECT_SECONDS  # for a host to answer
    interfaces: Sequence[str] = ()  # that all hosts share, if the system shall not choose
    training: TrainingLimits | None = None  # of a script that calls `fd.init()`
    silence_seconds: float = SILENCE_SECONDS  # after which another host counts as lost
    admission: Admission | None = None  # looks at hosts that are added, or were lost

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
        if not self.silence_seconds > 0:
            raise UserError(f"silence_seconds={self.silence_seconds} is no time.")

    def as_job(self) -> Job:
        """What each worker runs. The cores of a host are shared by as many as may be there."""
        workers = self.max_workers or self.workers or self.min_workers
        if self.whole_command:
            program, *command = self.command
            return Job(workers, command, self.environment, program=program)
        if self.training is not None:
            base = self.training.base
            environment = {**base.environment, ELASTIC_MOST: str(workers)}
            # Which worker is rank 0 changes.
            return replace(
                base, workers=workers, environment=environment, rank0_owns_terminal=False
            )
        return Job(workers, self.command, self.environment)

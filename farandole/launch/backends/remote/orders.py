"""What the launcher asks of an agent, once for the job and then for each worker; and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.launch.backends.remote.json_record import JsonRecord


@dataclass(frozen=True)
class Setup(JsonRecord):
    """What all workers of a job on a host have in common."""

    command: Sequence[str]  # begins with the program
    folder: str
    variables: dict[str, str]  # beside those of the host
    identity: str  # of the job
    worker_variable: str  # by whose number a worker's processes are found
    workers: int  # as many may be there at a time, to share the cores
    script: str | None  # the file whose contents must be the same on all hosts
    files: Sequence[str]  # others that must be there
    in_one_stream: bool  # a worker's errors among its output, so that their order stays
    grace_seconds: float  # between SIGTERM and SIGKILL
    may_fork: bool
    watches_activity: bool  # the launcher wants to know how far the workers have come
    silence_seconds: float  # after which the launcher, or the network, counts as gone


@dataclass(frozen=True)
class Order(JsonRecord):
    """One worker: the variables that tell it its rank, and how many share the host's cores."""

    local_workers: int
    variables: dict[str, str]


@dataclass(frozen=True)
class End(JsonRecord):
    """How a worker ended, and what it wrote into its error file."""

    exit_code: int
    error: str | None = None

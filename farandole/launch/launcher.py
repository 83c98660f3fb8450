"""Runs a job: chooses its policy and its backend, and supervises it.

    policy      stop all     when one worker fails, all are stopped
                tolerant     the others go on without it (jobs with parameter servers)
                elastic      workers and hosts come and go
    backend     local        workers of this host
                remote       workers of other hosts, through an agent on each

Each of these functions says how the job went, and leaves no process behind, whatever happens.

Of all these only the elastic policy imports torch, for its place in the store. A launcher that does
not need it starts in a seventh of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.environment import ELASTIC_WORKER
from farandole.launch.backends.by_host import BackendByHost
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.remote.backend import (
    CONNECT_SECONDS,
    NOTHING_MORE,
    SILENCE_SECONDS,
    RemoteBackend,
)
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.remote.requirements import Requirements
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.hosts import HERE
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.policies.stop_all import StopAll
from farandole.launch.policies.tolerant import Tolerant
from farandole.launch.probes.own_address import own_address
from farandole.launch.probes.problems import Problem
from farandole.launch.supervisor import supervise
from farandole.launch.worker_pool import WorkerPool
from farandole.topology import Topology
from farandole.worker.network import address_for, is_here
from farandole.worker.store.address import LOOPBACK
from farandole.worker.store.job_store import JobStore

if TYPE_CHECKING:
    from farandole.launch.policies.elastic.job import ElasticJob

__all__ = [
    "Job",
    "Outcome",
    "launch",
    "launch_elastic",
    "launch_on_hosts",
    "launch_tolerant",
]


def launch(job: Job) -> Outcome:
    """Runs `job` on workers of this host."""
    return launch_on_hosts(job, Topology.single(job.workers, HERE), Ssh())


def launch_on_hosts(
    job: Job,
    topology: Topology,
    channel: Channel,
    interfaces: Sequence[str] = (),
    *,
    address: str | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    files: Sequence[str] = (),
    shared_folders: Sequence[Path] = (),
) -> Outcome:
    """Runs `job` on the hosts of `topology`; the one called `localhost` is this one.

    The others are reached by `channel`, and must answer within `connect_seconds`.
    `address` is where the others reach this one, if that shall not be found out by their names.
    `interfaces` are those that the hosts share, if the system shall not choose. Every host must
    have the job's script and the further `files`, and see the `shared_folders` of this one.

    Raises `LaunchError` before any worker starts, naming each host that cannot take part and why;
    also when a worker cannot be started.
    """
    others = [host.name for host in topology.hosts if host.name != HERE]
    if not others:
        pool = _pool(job, JobDirectory(job))
    else:
        unreachable: Mapping[str, Problem] = {}
        if address is None:
            # Without any address all hosts are asked all the same, so that each is named. None can
            # take part then, and nothing but loopback is listened on.
            address, unreachable = own_address(channel, others, interfaces)
        here = sum(len(host.ranks) for host in topology.hosts if host.name == HERE)
        directory = JobDirectory(job, here=here)
        pool = _pool(
            job,
            directory,
            address=address or LOOPBACK,
            channel=channel,
            interfaces=interfaces,
            connect_seconds=connect_seconds,
            requirements=Requirements(files, shared_folders, unreachable),
            workers_by_host={host.name: len(host.ranks) for host in topology.hosts},
        )
    policy = Tolerant if job.tolerant else StopAll
    return supervise(pool, policy(pool, job, topology))


def launch_tolerant(
    job: Job,
    *,
    on_lost: Callable[[int], None] | None = None,
    on_restart: Callable[[int], None] | None = None,
    check: Callable[[], Sequence[str] | None] | None = None,
) -> Outcome:
    """Runs a tolerant `job` on this host, with the callbacks that `Tolerant` describes.

    What `check` raises is raised here, when all workers are gone.
    """
    pool = _pool(job, JobDirectory(job))
    policy = Tolerant(
        pool,
        job,
        Topology.single(job.workers, HERE),
        on_lost=on_lost,
        on_restart=on_restart,
        check=check,
    )
    return supervise(pool, policy)


def launch_elastic(job: ElasticJob) -> Outcome:
    """Runs an elastic `job`.

    Raises `LaunchError` when there are too few hosts, or more changes than `reset_limit`, and what
    the first call of `discover` raises.
    """
    from farandole.launch.policies.elastic.discovery import Discovery
    from farandole.launch.policies.elastic.policy import Elastic
    from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
    from farandole.launch.policies.elastic.training_policy import ElasticTrainingPolicy

    discovery = Discovery(job.discover)
    discovery.start()
    try:
        hosts = discovery.hosts or {}
        others = [host for host in hosts if not is_here(host)]
        # Where the user has named other hosts, or an interface that they share, they can reach us.
        is_shared = bool(others or job.interfaces)
        address = address_for(others, job.interfaces) if is_shared else LOOPBACK
        each = job.as_job()
        # The cores of this host are shared by as many as may be here.
        own = sum(slots for host, slots in hosts.items() if host not in others)
        here = min(max(own, 1), each.workers) if is_shared else None
        directory = JobDirectory(each, ELASTIC_WORKER, here=here)
        pool = _pool(
            each,
            directory,
            address=address,
            channel=job.channel if is_shared else None,
            interfaces=job.interfaces,
            connect_seconds=job.connect_seconds,
            silence_seconds=job.silence_seconds,
        )
        kind = Elastic if job.training is None else ElasticTrainingPolicy
        policy = kind(job, pool, RendezvousServer(pool.endpoint.store), discovery)
        return supervise(pool, policy)
    finally:
        discovery.stop()


def _pool(
    job: Job,
    directory: JobDirectory,
    *,
    address: str = LOOPBACK,
    channel: Channel | None = None,
    interfaces: Sequence[str] = (),
    connect_seconds: float = CONNECT_SECONDS,
    requirements: Requirements = NOTHING_MORE,
    silence_seconds: float = SILENCE_SECONDS,
    workers_by_host: Mapping[str, int] | None = None,
) -> WorkerPool:
    """With a `channel` also for workers of other hosts, which reach the launcher at `address`."""
    try:
        store = JobStore(directory.folder, address)
    except BaseException:
        directory.close(keep_logs=False)
        raise
    endpoint = LauncherEndpoint(store, address, channel is not None, interfaces)
    local = LocalBackend(job, directory, endpoint)
    remote = None
    if channel is not None:
        remote = RemoteBackend(
            job,
            directory,
            endpoint,
            channel,
            connect_seconds=connect_seconds,
            requirements=requirements,
            silence_seconds=silence_seconds,
        )
    backend = BackendByHost(local, remote)
    return WorkerPool(job, directory, endpoint, backend, workers_by_host)

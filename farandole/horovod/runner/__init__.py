"""`horovod.run(func, …)`: runs a function on workers and returns what each has returned.

Horovod sends the function itself, by cloudpickle. Here nothing is unpickled: the workers import the
function by its name, and arguments and results travel as numbers, strings, tensors, and lists,
tuples and dicts of these, in files of a private folder.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from farandole.errors import LaunchError, UserError
from farandole.horovod.aliases import shim_variables
from farandole.horovod.runner.call import Call, read_result
from farandole.horovod.runner.reference import refuse_inside_a_worker
from farandole.launch.backends.ssh.channel import Ssh, answer_seconds
from farandole.launch.hosts import HERE, gathered, parse_hosts, place_workers, read_hostfile
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.rank_variables import horovod_rank_variables
from farandole.topology import Topology

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | Path | None = None,
    disable_cache: bool | None = None,
    output_filename: str | Path | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """What `func(*args, **kwargs)` returned on each of `num_proc` workers, by rank.

    The arguments are Horovod's, in its order. `func` must be one that a worker can import: of a
    module, or of the script itself, at its top level. `use_gloo` and `disable_cache` ask for what
    is so anyway. Raises `UserError` for arguments that cannot work here, and `LaunchError` with the
    traceback of the worker that failed first.
    """
    refuse_inside_a_worker()
    if threading.current_thread() is not threading.main_thread():
        raise UserError("horovod.run() must be called from the main thread: it handles Ctrl-C.")
    _refuse_elastic(
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        min_np=min_np,
        max_np=max_np,
    )
    _refuse_mpi(use_mpi=use_mpi, mpi_args=mpi_args)
    topology = _topology(hosts, hostfile, num_proc if np is None else np)
    if not _has_other_hosts(topology):
        _refuse_remote(
            start_timeout=start_timeout,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            network_interface=network_interface,
        )
    key = Path(ssh_identity_file) if ssh_identity_file is not None else None
    ssh = Ssh(ssh_port, key, 30 if start_timeout is None else start_timeout)
    job = Job(
        workers=topology.size,
        command=("-m", "farandole.horovod.runner.task"),
        environment=shim_variables(),
        program=executable or sys.executable,
        per_rank=[horovod_rank_variables(topology, rank) for rank in range(topology.size)],
        output=Path(output_filename) if output_filename is not None else None,
    )
    interfaces = network_interface.split(",") if network_interface else ()
    call = Call.of(func, args, kwargs)
    return _perform(call, job, topology, ssh, interfaces, verbose=bool(verbose))


def _perform(
    call: Call,
    job: Job,
    topology: Topology,
    ssh: Ssh,
    interfaces: Sequence[str],
    *,
    verbose: bool,
) -> list[Any]:
    """The results of all workers, by rank. Raises `LaunchError` about the first that failed."""
    # Other hosts see this folder only where they share the current one.
    parent = Path.cwd() if _has_other_hosts(topology) else None
    with tempfile.TemporaryDirectory(prefix=".farandole-run-", dir=parent) as name:
        folder = Path(name)
        call.write(folder)
        job = replace(job, command=(*job.command, name))
        if verbose:
            words = shlex.join([job.program, *job.command])
            print(f"horovod.run: {topology}: {words}", file=sys.stderr)
        _check(launch_on_hosts(job, topology, ssh, interfaces, connect_seconds=answer_seconds(ssh)))
        return [read_result(folder, topology, rank) for rank in range(topology.size)]


def _refuse_elastic(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            _refuse(
                name, value, "the number of workers is fixed here", "--min-np … python train.py"
            )


def _refuse_mpi(**given: object) -> None:
    for name, value in given.items():
        if value:
            _refuse(name, value, "mpirun starts whole scripts", "--mpi python train.py")


def _refuse_remote(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"{name}={value!r} is for other hosts, and all workers are on this one."
            )


def _has_other_hosts(topology: Topology) -> bool:
    return any(host.name != HERE for host in topology.hosts)


def _refuse(name: str, value: object, why: str, instead: str) -> NoReturn:
    raise UserError(f"{name}={value!r}: {why}. Start a script: farandole horovodrun {instead}")


def _topology(hosts: str | None, hostfile: str | Path | None, workers: int) -> Topology:
    if hosts is not None and hostfile is not None:
        raise UserError(f"hosts={hosts!r} and hostfile={str(hostfile)!r}: give one of them.")
    if workers < 1:
        raise UserError(f"num_proc={workers}: a job needs at least 1 worker.")
    if hosts is not None:
        return place_workers(gathered(parse_hosts(hosts, "hosts")), workers)
    if hostfile is not None:
        return place_workers(gathered(read_hostfile(Path(hostfile))), workers)
    return Topology.single(workers, HERE)


def _check(outcome: Outcome) -> None:
    if outcome.stopped_by is not None:
        raise KeyboardInterrupt(outcome.stopped_by)
    failure = outcome.failure
    if failure is not None:
        raise LaunchError(
            f"horovod.run(): {failure}\n{failure.error.rstrip()}\n"
            f"Every rank's output is in {outcome.logs}."
        )

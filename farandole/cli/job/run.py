"""From the options of `farandole run` to a job that has ended."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from farandole import environment
from farandole.cli.elastic_options import is_elastic
from farandole.cli.job.elastic import run_elastic
from farandole.cli.job.horovod import refuse_settings_of_our_own, with_horovod
from farandole.cli.job.per_gpu import check_per_gpu, find_sharing
from farandole.cli.job.run_options import RunOptions
from farandole.cli.job.scheme import read_scheme
from farandole.cli.job.trace_file import merge_trace
from farandole.cli.job.worker_variables import worker_variables
from farandole.cli.options import (
    check_limits,
    check_link,
    check_script,
    tell_of_late_options,
)
from farandole.errors import UserError
from farandole.options import read_chosen

if TYPE_CHECKING:
    from farandole.launch.gpu.sharing import GpuSharing
    from farandole.launch.job import Job, Outcome
    from farandole.launch.placement.placement import Placement
    from farandole.launch.servers import OthersServers, OwnServers
    from farandole.layout import Layout
    from farandole.sync import Strategy
    from farandole.topology import Topology


def check(options: RunOptions, *, script_here: bool = True, mpi: bool = False) -> None:
    """Raises `UserError` for values that cannot work, before torch is imported.

    `script_here`: the workers find the script on this host. `mpi`: mpirun starts them.
    """
    if options.horovod:
        refuse_settings_of_our_own(options)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"-n {options.workers}: a job needs at least 1 worker.")
    check_per_gpu(options)
    _check_times(options)
    read_chosen(shlex.join(options.choose))
    check_link(options.link, options.pretend_hosts)
    if options.link is not None and options.transport == "mpi":
        raise UserError(
            f"--link {options.link}: no link can be simulated for --transport mpi. Leave one of "
            "the two out."
        )
    if not options.module and script_here:
        check_script(options.script)
    if options.transport == "mpi" and not mpi:
        raise UserError(
            "--transport mpi needs ranks that mpirun has started: "
            f"farandole run --on mpi -n {options.workers or 2} --transport mpi {options.script}"
        )
    if options.workers is None:
        tell_of_late_options(options.arguments, ("-n", "--workers"))


def _check_times(options: RunOptions) -> None:
    if options.exit_timeout is not None and not options.exit_timeout > 0:
        raise UserError(
            f"--exit-timeout {options.exit_timeout:g}: give seconds above 0; inf: no limit."
        )
    check_limits(options.stall, options.grace)
    if options.stall_kill and options.stall is None:
        raise UserError("--stall-kill: say with --stall SECONDS how long is too long.")


def run_job(options: RunOptions) -> tuple[Outcome, Topology]:
    """How the job ended, and where its workers were."""
    from farandole.launch.placement.placement import Placement, place
    from farandole.launch.probes.crowding import warn_if_crowded
    from farandole.launch.servers import plan_servers

    may_grow = is_elastic(options) and options.where.hostfile is not None
    sharing = find_sharing(options)
    if sharing is not None:
        described, placement = None, Placement.here(sharing.workers)
    else:
        described = place(options.where, options.workers, may_grow=may_grow)
        placement = described or Placement.here(options.workers or _gpu_count() or 1)
    strategy, layout = read_scheme(options.sync, options.layout, placement.topology.size)
    plan = plan_servers(
        strategy, options.servers, options.replicas, options.functions, options.key_file
    )
    if placement.others:
        _check_other_hosts(options, placement, plan)
    job = _job(options, placement, strategy, layout, plan)
    if options.link is not None:
        from farandole.launch.messages import tell

        tell(f"the link between the pretended hosts is simulated: {options.link}")
    if described is None and sharing is None and options.workers is not None:
        warn_if_crowded(job.workers, "-n ")
    if is_elastic(options) and plan is None:
        return run_elastic(
            options,
            job,
            placement,
            strategy,
            layout,
            lambda job, lost: _launch(options, job, _without(described, lost, job), plan, sharing),
        )
    if options.min_workers is not None:
        raise UserError(
            f"--min {options.min_workers} is for jobs without parameter servers. With them any "
            "worker except rank 0 may fail anyway; leave --min out."
        )
    try:
        outcome = _launch(options, job, described, plan, sharing)
    finally:
        if options.trace is not None:
            merge_trace(options.trace)
    return outcome, placement.topology


def _launch(
    options: RunOptions,
    job: Job,
    placement: Placement | None,
    plan: OwnServers | OthersServers | None,
    sharing: GpuSharing | None,
) -> Outcome:
    if sharing is not None:
        from farandole.launch.gpu.sharing import launch_sharing

        return launch_sharing(
            sharing, job, lambda job: _launch(options, job, placement, plan, None)
        )
    from farandole.launch.launcher import launch
    from farandole.launch.servers import OthersServers, OwnServers, launch_with_servers

    if isinstance(plan, OwnServers):
        return launch_with_servers(job, plan)
    if placement is None:
        return launch(job)
    from farandole.launch.messages import tell
    from farandole.launch.placement.launch import launch_placed

    if not placement.rank0_is_here and not options.horovod:
        first = placement.topology.host(0).name
        tell(f"rank 0 is on host {first}: what the run logs and saves is written there")
    return launch_placed(
        job,
        placement,
        files=[str(plan.key_file)] if isinstance(plan, OthersServers) else [],
        shared_folders=[options.trace.parent] if options.trace is not None else [],
    )


def _without(placement: Placement | None, lost: frozenset[str], job: Job) -> Placement | None:
    if placement is None or not lost:
        return placement
    return placement.without(lost, job.workers)


def _check_other_hosts(
    options: RunOptions, placement: Placement, plan: OwnServers | OthersServers | None
) -> None:
    """Raises `UserError` for what works on this host only."""
    from farandole.launch.servers import OwnServers

    others = ", ".join(placement.others)
    if isinstance(plan, OwnServers):
        raise UserError(
            f"parameter servers that a job starts can be reached from this host only, and workers "
            f"are on {others}. Start them with `farandole server --bind ADDRESS:PORT --key-file "
            "FILE`, copy the key file to every host, and give --servers tcp://ADDRESS:PORT "
            "--key-file FILE."
        )
    if options.pretend_hosts is not None:
        raise UserError(
            f"--pretend-hosts {options.pretend_hosts} is for workers of one host, and there are "
            f"real ones: {others}. Leave one of the two out."
        )


def check_scheme(options: RunOptions, workers: int) -> None:
    """Raises `UserError` where strategy, layout and servers do not go with so many workers on
    other hosts."""
    _scheme_elsewhere(options, workers)


def job_of(options: RunOptions, topology: Topology) -> Job:
    """The job on these hosts, for our own launcher, started by an engine. Raises `UserError`."""
    from farandole.launch.backends.ssh.channel import Ssh
    from farandole.launch.placement.placement import Placement

    strategy, layout, plan = _scheme_elsewhere(options, topology.size)
    placement = Placement(topology, Ssh())
    if placement.others:
        _check_other_hosts(options, placement, plan)
    return _job(options, placement, strategy, layout, plan)


def _scheme_elsewhere(
    options: RunOptions, workers: int
) -> tuple[Strategy | None, Layout | None, OthersServers | None]:
    from farandole.launch.servers import OwnServers, plan_servers

    if options.link is not None:
        raise UserError(
            f"--link {options.link} simulates a link on this machine, between workers that our own "
            "launcher starts here. Leave out --link or --on."
        )
    strategy, layout = read_scheme(options.sync, options.layout, workers)
    plan = plan_servers(
        strategy, options.servers, options.replicas, options.functions, options.key_file
    )
    if isinstance(plan, OwnServers):
        raise UserError(
            "parameter servers are started with jobs of this host only. Start them with `farandole "
            "server --bind ADDRESS:PORT --key-file FILE`, and give --servers tcp://ADDRESS:PORT "
            "--key-file FILE."
        )
    return strategy, layout, plan


def variables_of(options: RunOptions, workers: int) -> dict[str, str]:
    """What tells workers what was asked for, where another launcher than ours starts them."""
    strategy, layout, plan = _scheme_elsewhere(options, workers)
    found = worker_variables(replace(options, trace=None), strategy, layout)
    if options.trace is not None:
        found[environment.TRACE] = str(options.trace)
    if plan is not None:
        found |= {environment.SERVERS: plan.address, environment.SERVER_KEY: str(plan.key_file)}
    return found


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _job(
    options: RunOptions,
    placement: Placement,
    strategy: Strategy | None,
    layout: Layout | None,
    plan: OwnServers | OthersServers | None,
) -> Job:
    from farandole.launch.job import Job
    from farandole.launch.servers import OthersServers

    variables = worker_variables(options, strategy, layout)
    topology = _topology(options, placement)
    if len(topology.hosts) > 1 and strategy is not None and layout is None:
        import torch

        strategy.check_place(topology, "cuda" if torch.cuda.device_count() else "cpu")
    if isinstance(plan, OthersServers):
        if options.link is not None:
            raise UserError(
                f"--link {options.link} is between the hosts of this job, and the servers at "
                f"{plan.address} are on none of them. Let the job start its own: --servers 1."
            )
        variables[environment.SERVERS] = plan.address
        variables[environment.SERVER_KEY] = str(plan.key_file)
    job = Job(
        workers=topology.size,
        command=(*(["-m"] if options.module else []), options.script, *options.arguments),
        environment=variables,
        rank0_owns_terminal=sys.stdout.isatty() and sys.stderr.isatty(),
        tolerant=plan is not None,
        restarts=options.restarts if plan is not None else 0,
        fork=not options.no_fork,
        exit_seconds=options.exit_timeout,
        stall_seconds=options.stall,
        stall_kill=options.stall_kill,
        grace_seconds=options.grace,
    )
    return with_horovod(job, topology, options.trace) if options.horovod else job


def _topology(options: RunOptions, placement: Placement) -> Topology:
    """The pretended hosts, if there are any, else the real ones."""
    if options.pretend_hosts is None:
        return placement.topology
    from farandole.train.settings import pretended_hosts

    return pretended_hosts(options.pretend_hosts, placement.topology.size)

"""From the options of `farandole run` to a job that has ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole import environment
from farandole.cli.elastic_job import run_elastic
from farandole.cli.elastic_options import is_elastic
from farandole.cli.options import check_limits, check_script
from farandole.errors import FarandoleError, UserError

if TYPE_CHECKING:
    from farandole.launch.job import Job, Outcome
    from farandole.launch.servers import OthersServers, OwnServers
    from farandole.layout import Layout
    from farandole.sync import Strategy


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options as given; None: not given."""

    workers: int | None
    layout: str | None
    sync: str | None
    name: str | None
    runs: Path | None
    fallback: bool
    seed: int | None
    transport: str | None
    hosts: str | None
    no_check_finite: bool
    trace: Path | None
    servers: str | None
    replicas: int | None
    functions: tuple[str, ...]
    key_file: Path | None
    restarts: int
    min_workers: int | None
    max_workers: int | None
    replace_stragglers: bool
    elastic_wait: float
    exit_timeout: float | None
    stall: float | None
    stall_kill: bool
    grace: float
    horovod: bool
    no_fork: bool
    module: bool
    script: str
    arguments: tuple[str, ...]


def check(options: RunOptions) -> None:
    """Raises `UserError` for values that cannot work, before torch is imported."""
    if options.horovod:
        _refuse_settings_of_our_own(options)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"-n {options.workers}: a job needs at least 1 worker.")
    _check_times(options)
    if not options.module:
        check_script(options.script)
    if options.transport == "mpi":
        raise UserError(
            "--transport mpi needs ranks that mpirun has started: "
            f"{environment.TRANSPORT}=mpi mpirun -n {options.workers or 2} python {options.script}"
        )
    if options.workers is None and {"-n", "--workers"} & set(options.arguments):
        click.echo(
            "farandole: -n after the script is the script's own; ours goes before it", err=True
        )


def _check_times(options: RunOptions) -> None:
    if options.exit_timeout is not None and not options.exit_timeout > 0:
        raise UserError(
            f"--exit-timeout {options.exit_timeout:g}: give seconds above 0; inf: no limit."
        )
    check_limits(options.stall, options.grace)
    if options.stall_kill and options.stall is None:
        raise UserError("--stall-kill: say with --stall SECONDS how long is too long.")


def run_job(options: RunOptions) -> tuple[Outcome, int]:
    """How the job ended, and how many workers it had."""
    from farandole.launch.launcher import launch
    from farandole.launch.servers import OwnServers, launch_with_servers, plan_servers

    count = options.workers or _gpu_count() or 1
    strategy, layout = _scheme(options, count)
    plan = plan_servers(
        strategy, options.servers, options.replicas, options.functions, options.key_file
    )
    job = _job(options, count, strategy, layout, plan)
    if is_elastic(options) and plan is None:
        return run_elastic(options, job, strategy, layout), count
    if options.min_workers is not None:
        raise UserError(
            f"--min {options.min_workers} is for jobs without parameter servers. With them any "
            "worker except rank 0 may fail anyway; leave --min out."
        )
    try:
        outcome = launch_with_servers(job, plan) if isinstance(plan, OwnServers) else launch(job)
    finally:
        if options.trace is not None:
            _merge(options.trace)
    return outcome, count


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _scheme(options: RunOptions, workers: int) -> tuple[Strategy | None, Layout | None]:
    """The strategy and the layout that were asked for. Imports torch only where one was."""
    if options.sync is None and options.layout is None:
        return None, None
    from farandole.sync import parse
    from farandole.train import settings

    strategy = parse(options.sync) if options.sync is not None else None
    layout = settings.read_layout(options.layout) if options.layout is not None else None
    if layout is not None:
        settings.check_workers(layout, workers)
        if strategy is not None:
            settings.check_goes_with(layout, strategy)
    return strategy, layout


def _job(
    options: RunOptions,
    count: int,
    strategy: Strategy | None,
    layout: Layout | None,
    plan: OwnServers | OthersServers | None,
) -> Job:
    from farandole.launch.job import Job
    from farandole.launch.servers import OthersServers

    variables = _variables(options, strategy, layout)
    if options.hosts is not None:
        _check_hosts(options.hosts, count, strategy, layout)
    if isinstance(plan, OthersServers):
        variables[environment.SERVERS] = plan.address
        variables[environment.SERVER_KEY] = str(plan.key_file)
    job = Job(
        workers=count,
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
    return _with_horovod(job, options.hosts, options.trace) if options.horovod else job


def _variables(
    options: RunOptions, strategy: Strategy | None, layout: Layout | None
) -> dict[str, str]:
    """What tells the workers what was asked for."""
    asked = {
        environment.SYNC: str(strategy) if strategy is not None else None,
        environment.LAYOUT: _layout_text(layout) if layout is not None else None,
        environment.NAME: options.name,
        environment.RUNS: str(options.runs) if options.runs else None,
        environment.FALLBACK: "1" if options.fallback else None,
        environment.SEED: str(options.seed) if options.seed is not None else None,
        environment.SCRIPT: options.script,
        environment.TRANSPORT: (
            _checked_transport(options.transport) if options.transport is not None else None
        ),
        environment.CHECK_FINITE: "0" if options.no_check_finite else None,
        environment.HOSTS: options.hosts,
    }
    if options.trace is not None:
        from farandole.trace import merge as tracing

        asked[environment.TRACE_PARTS] = str(tracing.prepare(options.trace))
        asked[environment.TRACE] = ""  # the launcher merges the parts, not the ranks
    return {key: value for key, value in asked.items() if value is not None}


def _layout_text(layout: Layout) -> str:
    from farandole.train.settings import write_layout

    return write_layout(layout)


def _checked_transport(transport: str) -> str:
    from farandole.comm import check_transport

    return check_transport(transport)


def _check_hosts(
    hosts: str, workers: int, strategy: Strategy | None, layout: Layout | None
) -> None:
    import torch

    from farandole.train.settings import declared_hosts

    topology = declared_hosts(hosts, workers)
    if strategy is not None and layout is None:
        strategy.check_place(topology, "cuda" if torch.cuda.device_count() else "cpu")


def _refuse_settings_of_our_own(options: RunOptions) -> None:
    for name in ("sync", "layout", "servers", "name", "runs", "fallback", "seed"):
        if getattr(options, name) not in (None, False):
            raise UserError(
                f"--{name} is for scripts that call fd.init(); with --horovod the script calls "
                f"hvd.init(), which knows no such thing. Leave out --{name} or --horovod."
            )
    if options.stall is not None:
        raise UserError(
            "--stall watches scripts that call fd.init(). With --horovod set "
            "HOROVOD_STALL_CHECK_TIME_SECONDS, which names the ranks that are missing."
        )


def _with_horovod(job: Job, hosts: str | None, trace: Path | None) -> Job:
    """Where `import horovod` is ours, and each worker also gets its rank in Horovod's variables."""
    from farandole.horovod.aliases import shim_variables
    from farandole.launch.rank_variables import horovod_rank_variables
    from farandole.topology import Topology
    from farandole.train.settings import declared_hosts

    alone = Topology.single(job.workers)
    topology = declared_hosts(hosts, job.workers) if hosts is not None else alone
    timeline = {"HOROVOD_TIMELINE": str(trace)} if trace is not None else {}
    return replace(
        job,
        environment={**job.environment, **shim_variables(), **timeline},
        per_rank=[horovod_rank_variables(topology, rank) for rank in range(job.workers)],
    )


def _merge(trace: Path) -> None:
    """Whatever became of the job: what its ranks recorded is there."""
    from farandole.trace import merge as tracing
    from farandole.worker.signals import undisturbed

    if not tracing.parts_folder(trace).exists():
        return  # under hvd.init() rank 0 merges them itself, if it lives so long, and says so
    with undisturbed():
        try:
            merged = tracing.merge(trace)
        except FarandoleError as error:  # must not hide how the job ended; the parts stay
            click.secho(f"farandole: {error}", fg="red", err=True)
            return
        tracing.remove_parts(trace)
    said = merged or f"there is no trace {trace}: no rank got through fd.init()"
    click.echo(f"farandole: {said}", err=True)

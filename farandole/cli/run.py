"""`farandole run`: start a script on workers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farandole.cli.options import (
    PASS_ON,
    check_script,
    hosts_option,
    layout_option,
    seed_option,
    sync_option,
)
from farandole.errors import FarandoleError, UserError
from farandole.launch.outcome_text import print_outcome

if TYPE_CHECKING:
    from farandole.launch.job import Job


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, help="Workers on this host. [one per GPU, else 1]")
@layout_option()
@sync_option()
@click.option("--name", help="The run's folder below --runs. [<script>-<time>]")
@click.option("--runs", type=click.Path(path_type=Path), help="Where runs are kept. [runs]")
@click.option(
    "--fallback",
    is_flag=True,
    help="If the newest checkpoint is damaged or not finite, go on from the newest good one.",
)
@seed_option()
@click.option(
    "--transport",
    metavar="NAME",
    help="What carries the bytes: auto, shm (shared memory) or c10d (gloo, NCCL). [auto]",
)
@hosts_option()
@click.option(
    "--no-check-finite",
    is_flag=True,
    help="Go on with gradients and parameters that are NaN or infinite, instead of stopping.",
)
@click.option(
    "--trace",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    envvar="FARANDOLE_TRACE",
    help="Write a timeline of all ranks, for https://ui.perfetto.dev.",
)
@click.option(
    "--servers",
    metavar="N|tcp://HOST:PORT",
    help="Parameter servers to start for the job, or where those of `farandole server` are. "
    "[1 where --sync needs one]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Further copies of all that the servers hold, on other servers: so many may die. "
    "[1 with several servers, else 0]",
)
@click.option(
    "--functions",
    metavar="MODULE",
    multiple=True,
    help="A module with functions that the servers shall run. Give it once for each.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The key of servers at an address; `farandole server` prints its name.",
)
@click.option(
    "--restarts",
    type=int,
    default=0,
    metavar="R",
    help="Under servers: start a worker that has failed again, up to R times. [0]",
)
@click.option(
    "--exit-timeout",
    type=float,
    metavar="SECONDS",
    help="Once a worker is done, end the others after so long. [15 minutes of doing nothing, a day "
    "in any case]",
)
@click.option(
    "--stall",
    type=float,
    metavar="SECONDS",
    help="Name a worker that makes no step for so long, and show its Python stack.",
)
@click.option(
    "--stall-kill",
    is_flag=True,
    help="With --stall: also end that worker, if it does not just wait for another.",
)
@click.option(
    "--grace",
    type=float,
    default=30.0,
    metavar="SECONDS",
    help="When the job is stopped: how long workers have to save once more and leave. [30]",
)
@click.option(
    "--horovod",
    is_flag=True,
    help="In the workers, `import horovod` is Farandole's: for scripts written for Horovod.",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start every worker afresh; else 3 and more are forked from a process that has torch.",
)
@click.option("--outcome-file", hidden=True, type=click.Path(path_type=Path))  # for `race`
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    layout: str | None,
    sync: str | None,
    name: str | None,
    runs: Path | None,
    fallback: bool,
    seed: int | None,
    transport: str | None,
    hosts: str | None,
    no_check_finite: bool,
    trace: Path | None,
    servers: str | None,
    replicas: int | None,
    functions: tuple[str, ...],
    key_file: Path | None,
    restarts: int,
    exit_timeout: float | None,
    stall: float | None,
    stall_kill: bool,
    grace: float,
    horovod: bool,
    no_fork: bool,
    outcome_file: Path | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on workers of this host, each a process of its own.

    The script calls `fd.init()` and finds itself as one rank of many. Every line of output carries
    its rank; if a worker fails, the others are stopped and its traceback is shown last. With
    parameter servers only rank 0 is so important: without any other worker the rest go on.

    \b
      farandole run -n 4 train.py --epochs 10
      farandole run -n 4 --sync local:every=8 train.py
      farandole run -n 4 --layout stages=4,microbatches=8 train.py
      farandole run -n 4 --hosts 2 --sync daso train.py
      farandole run -n 4 --trace out.json train.py
      farandole run -n 4 --sync server --servers 3 --restarts 1 train.py
      farandole run -n 4 --horovod train_with_horovod.py
    """
    if horovod:
        _refuse_settings_of_our_own(click.get_current_context().params)
    if workers is not None and workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
    if exit_timeout is not None and not exit_timeout > 0:
        raise UserError(f"--exit-timeout {exit_timeout:g}: give seconds above 0; inf: no limit.")
    if stall is not None and not stall > 0:
        raise UserError(f"--stall {stall:g}: give the seconds without a step, above 0.")
    if stall_kill and stall is None:
        raise UserError("--stall-kill: say with --stall SECONDS how long is too long.")
    if not 0 < grace < float("inf"):
        raise UserError(f"--grace {grace:g}: give a number of seconds above 0.")
    if not module:
        check_script(script)
    if transport == "mpi":
        raise UserError(
            "--transport mpi needs ranks that mpirun has started: "
            f"FARANDOLE_TRANSPORT=mpi mpirun -n {workers or 2} python {script}"
        )

    if workers is None and {"-n", "--workers"} & set(arguments):
        click.echo(
            "farandole: -n after the script is the script's own; ours goes before it", err=True
        )

    import torch

    from farandole import environment as variables
    from farandole.comm import check_transport
    from farandole.launch.launcher import Job, launch
    from farandole.launch.outcome_file import write_outcome
    from farandole.launch.servers import (
        OthersServers,
        OwnServers,
        launch_with_servers,
        plan_servers,
    )
    from farandole.sync import parse
    from farandole.trace import merge as tracing
    from farandole.train import settings

    strategy = parse(sync) if sync is not None else None
    place = settings.read_layout(layout) if layout is not None else None
    count = workers or torch.cuda.device_count() or 1
    if place is not None:
        settings.check_workers(place, count)
        if strategy is not None:
            settings.check_goes_with(place, strategy)
    plan = plan_servers(strategy, servers, replicas, functions, key_file)
    if restarts and plan is None:
        raise UserError(
            f"--restarts {restarts}: without parameter servers no worker can come back alone. "
            "Choose a strategy that needs them, such as --sync server, or leave --restarts out."
        )
    chosen = {
        settings.SYNC: str(strategy) if strategy is not None else None,
        settings.LAYOUT: settings.write_layout(place) if place is not None else None,
        settings.NAME: name,
        settings.FOLDER: str(runs) if runs else None,
        settings.FALLBACK: "1" if fallback else None,
        settings.SEED: str(seed) if seed is not None else None,
        settings.SCRIPT: script,
        settings.TRANSPORT: check_transport(transport) if transport is not None else None,
        settings.CHECK_FINITE: "0" if no_check_finite else None,
    }
    if trace is not None:
        trace = trace.absolute()
        chosen[settings.TRACE_PARTS] = str(tracing.prepare(trace))
        chosen[settings.TRACE] = ""  # the ranks need not merge
    if hosts is not None:
        topology = settings.declared_hosts(hosts, count)  # or says what is wrong with it
        if strategy is not None and place is None:
            strategy.check_place(topology, "cuda" if torch.cuda.device_count() else "cpu")
        chosen[settings.HOSTS] = hosts
    if isinstance(plan, OthersServers):
        chosen[variables.SERVERS] = plan.address
        chosen[variables.SERVER_KEY] = str(plan.key_file)
    job = Job(
        workers=count,
        command=(*(["-m"] if module else []), script, *arguments),
        environment={key: value for key, value in chosen.items() if value is not None},
        rank0_owns_terminal=sys.stdout.isatty() and sys.stderr.isatty(),
        tolerant=plan is not None,
        restarts=restarts,
        fork=not no_fork,
        exit_seconds=exit_timeout,
        stall_seconds=stall,
        stall_kill=stall_kill,
        grace_seconds=grace,
    )
    if horovod:
        job = _with_horovod(job, hosts, trace)
    try:
        outcome = launch_with_servers(job, plan) if isinstance(plan, OwnServers) else launch(job)
    finally:
        if trace is not None:
            _merge(trace)
    print_outcome(outcome, count)
    if outcome_file is not None:
        write_outcome(outcome_file, outcome)
    sys.exit(outcome.exit_code)


def _refuse_settings_of_our_own(given: dict[str, Any]) -> None:
    for name in ("sync", "layout", "servers", "name", "runs", "fallback", "seed"):
        if given[name] not in (None, False):
            raise UserError(
                f"--{name} is for scripts that call fd.init(); with --horovod the script calls "
                f"hvd.init(), which knows no such thing. Leave out --{name} or --horovod."
            )
    if given["stall"] is not None:
        raise UserError(
            "--stall watches scripts that call fd.init(). With --horovod set "
            "HOROVOD_STALL_CHECK_TIME_SECONDS, which names the ranks that are missing."
        )


def _with_horovod(job: Job, hosts: str | None, trace: Path | None) -> Job:
    """Where `import horovod` is ours, and each worker is told its seat in Horovod's words too."""
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

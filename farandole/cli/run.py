"""`farandole run`: start a script on workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from farandole.launch.failure import Failure
    from farandole.launch.job import Outcome


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, help="Workers on this host. [one per GPU, else 1]")
@layout_option()
@sync_option()
@click.option("--name", help="The run's folder below --runs. [<script>-<time>]")
@click.option("--runs", type=click.Path(path_type=Path), help="Where runs are kept. [runs]")
@seed_option()
@click.option(
    "--transport",
    metavar="NAME",
    help="What carries the bytes: auto, shm (shared memory) or c10d (gloo, NCCL). [auto]",
)
@hosts_option()
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
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    layout: str | None,
    sync: str | None,
    name: str | None,
    runs: Path | None,
    seed: int | None,
    transport: str | None,
    hosts: str | None,
    trace: Path | None,
    servers: str | None,
    replicas: int | None,
    functions: tuple[str, ...],
    key_file: Path | None,
    restarts: int,
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
    """
    if workers is not None and workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
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

    from farandole import variables
    from farandole.comm import check_transport
    from farandole.launch import tracing
    from farandole.launch.local import Job, launch
    from farandole.launch.servers import (
        OthersServers,
        OwnServers,
        launch_with_servers,
        plan_servers,
    )
    from farandole.sync import parse
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
        settings.SEED: str(seed) if seed is not None else None,
        settings.SCRIPT: script,
        settings.TRANSPORT: check_transport(transport) if transport is not None else None,
    }
    if trace is not None:
        trace = trace.absolute()
        chosen[settings.TRACE_PARTS] = str(tracing.prepare(trace))
        chosen[settings.TRACE] = ""  # the ranks need not merge
    if hosts is not None:
        settings.declared_hosts(hosts, count)  # or says what is wrong with it
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
    )
    try:
        outcome = launch_with_servers(job, plan) if isinstance(plan, OwnServers) else launch(job)
    finally:
        if trace is not None:
            _merge(trace)
    _tell_end(outcome, count)
    sys.exit(outcome.exit_code)


def _tell_end(outcome: Outcome, workers: int) -> None:
    if outcome.stopped_by is not None:
        click.secho(f"farandole: stopped by {outcome.stopped_by}; no worker is left", err=True)
        return
    lost = ", ".join(f"rank {rank}" for rank in outcome.lost)
    kept = f"every rank's output is in {outcome.logs}"
    if outcome.failure is not None:
        if lost:
            click.echo(f"farandole: lost before the end: {lost}", err=True)
        _explain(outcome.failure, workers - len(outcome.lost))
        click.echo(f"farandole: {kept}", err=True)
    elif lost:
        click.secho(f"farandole: done, but without {lost}; {kept}", fg="yellow", err=True)


def _merge(trace: Path) -> None:
    """Whatever became of the job: what its ranks recorded is there."""
    from farandole.launch import tracing
    from farandole.launch.signals import undisturbed

    with undisturbed():
        try:
            merged = tracing.merge(trace)
        except FarandoleError as error:  # must not hide how the job ended; the parts stay
            click.secho(f"farandole: {error}", fg="red", err=True)
            return
        tracing.remove_parts(trace)
    said = merged or f"there is no trace {trace}: no rank got through fd.init()"
    click.echo(f"farandole: {said}", err=True)


def _explain(failure: Failure, workers: int) -> None:
    how = (
        f"was killed by {failure.killed_by}"
        if failure.killed_by
        else f"failed (exit code {failure.exit_code})"
    )
    others = {1: "", 2: "; the other was stopped"}
    rest = others.get(workers, f"; the other {workers - 1} were stopped")
    click.secho(f"\nfarandole: rank {failure.rank} {how}{rest}", fg="red", err=True)
    if failure.error:
        click.echo(failure.error.rstrip(), err=True)
    if failure.killed_by == "SIGKILL":
        click.echo("(the system kills a process so when memory runs out)", err=True)

"""`farandole run`: start a script on workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farandole.cli.options import PASS_ON, check_script, seed_option, sync_option
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.launch.failure import Failure


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, help="Workers on this host. [one per GPU, else 1]")
@sync_option()
@click.option("--name", help="The run's folder below --runs. [<script>-<time>]")
@click.option("--runs", type=click.Path(path_type=Path), help="Where runs are kept. [runs]")
@seed_option()
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    sync: str | None,
    name: str | None,
    runs: Path | None,
    seed: int | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on workers of this host, each a process of its own.

    The script calls `fd.init()` and finds itself as one rank of many. Every line of output carries
    its rank; if a worker fails, the others are stopped and its traceback is shown last.

    \b
      farandole run -n 4 train.py --epochs 10
      farandole run -n 4 --sync allreduce:bucket_mib=5 train.py
    """
    if workers is not None and workers < 1:
        raise UserError(f"-n {workers}: a job needs at least 1 worker.")
    if not module:
        check_script(script)

    if workers is None and {"-n", "--workers"} & set(arguments):
        click.echo(
            "farandole: -n after the script is the script's own; ours goes before it", err=True
        )

    import torch

    from farandole.launch.local import Job, launch
    from farandole.sync import parse
    from farandole.train import settings

    chosen = {
        settings.SYNC: str(parse(sync)) if sync is not None else None,
        settings.NAME: name,
        settings.FOLDER: str(runs) if runs else None,
        settings.SEED: str(seed) if seed is not None else None,
        settings.SCRIPT: script,
    }
    job = Job(
        workers=workers or torch.cuda.device_count() or 1,
        command=(*(["-m"] if module else []), script, *arguments),
        environment={key: value for key, value in chosen.items() if value is not None},
        rank0_owns_terminal=sys.stdout.isatty() and sys.stderr.isatty(),
    )
    outcome = launch(job)
    if outcome.stopped_by is not None:
        click.secho(f"farandole: stopped by {outcome.stopped_by}; no worker is left", err=True)
    elif outcome.failure is not None:
        _explain(outcome.failure, job.workers)
        click.echo(f"farandole: every rank's output is in {outcome.logs}", err=True)
    sys.exit(outcome.exit_code)


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

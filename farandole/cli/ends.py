"""Says how a job ended: which rank failed and why, what is kept, and who is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from farandole.launch.failure import Failure
    from farandole.launch.job import Outcome


def tell_end(outcome: Outcome, workers: int) -> None:
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

"""Says how a job ended: which rank failed and why, what is kept, and who is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farandole.worker.failure import Kind

if TYPE_CHECKING:
    from farandole.launch.job import Outcome
    from farandole.topology import Topology
    from farandole.worker.failure import Failure


def print_outcome(
    outcome: Outcome, workers: int, who: str = "rank", topology: Topology | None = None
) -> None:
    """`who` it is that has a number: in an elastic job ranks change, and workers have one.

    With a `topology` of several hosts, the host of the rank that failed is named too.
    """
    if outcome.stopped_by is not None:
        click.secho(f"farandole: stopped by {outcome.stopped_by}; no worker is left", err=True)
        return
    lost = ", ".join(f"{who} {rank}" for rank in outcome.lost)
    kept = f"every {who}'s output is in {outcome.logs}"
    if outcome.failure is not None:
        if lost:
            click.echo(f"farandole: lost before the end: {lost}", err=True)
        name = name_of_worker(outcome.failure.rank, who, topology)
        _explain(outcome.failure, workers - len(outcome.lost), name)
        click.echo(f"farandole: {kept}", err=True)
    elif lost:
        click.secho(f"farandole: done, but without {lost}; {kept}", fg="yellow", err=True)
    elif workers > 1 and not outcome.joined:
        click.secho(
            f"farandole: note: none of the {workers} workers joined the others (no fd.init(), no "
            "hvd.init(), no torch.distributed), so each ran the whole script by itself. Write "
            "`run = fd.init()` at its top, then `model, opt = run.distribute(model, opt)`.",
            fg="yellow",
            err=True,
        )


def name_of_worker(number: int, who: str, topology: Topology | None) -> str:
    """`rank 3`, or `rank 3 on node2` where there are several hosts."""
    if topology is None or len(topology.hosts) == 1:
        return f"{who} {number}"
    return f"{who} {number} on {topology.host(number).name}"


def _explain(failure: Failure, workers: int, name: str) -> None:
    if failure.kind is Kind.HELD_UP:
        click.secho(f"\nfarandole: {name} {failure.error}", fg="red", err=True)
        return
    how = (
        f"was killed by {failure.killed_by}"
        if failure.killed_by
        else f"failed (exit code {failure.exit_code})"
    )
    others = {1: "", 2: "; the other was stopped"}
    rest = others.get(workers, f"; the other {workers - 1} were stopped")
    click.secho(f"\nfarandole: {name} {how}{rest}", fg="red", err=True)
    if failure.error:
        click.echo(failure.error.rstrip(), err=True)
    if failure.advice:
        click.echo(f"farandole: {failure.advice}", err=True)
    # The text is all there is: a worker is the user's own `python script.py`, and what fails at its
    # imports has not called `fd.init()`, which would record the exception. So the error is the end
    # of its standard error. Nothing but this hint depends on it.
    if "No module named 'horovod'" in failure.error:
        click.echo(
            "(a script written for Horovod: farandole run --horovod, or farandole horovodrun)",
            err=True,
        )
    if failure.killed_by == "SIGKILL":
        click.echo("(the system kills a process so when memory runs out)", err=True)

"""The file of `--trace`: what the ranks of a job have recorded, made one by the launcher."""

from __future__ import annotations

from pathlib import Path

import click

from farandole.errors import FarandoleError


def merge_trace(trace: Path) -> None:
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

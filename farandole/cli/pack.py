"""`farandole pack`: makes shards of a folder of files."""

from __future__ import annotations

from pathlib import Path

import click

from farandole.bench.comm.sizes import parse_size
from farandole.errors import UserError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--size", metavar="SIZE", help="Most bytes of a shard, such as 64MiB. [256MiB]")
@click.option("--samples", type=int, help="Samples in a shard, whatever their size.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the shuffled order.")
@click.option("--in-order", is_flag=True, help="Keep the order of names instead of shuffling.")
def pack(
    folder: Path, target: Path, size: str | None, samples: int | None, seed: int, in_order: bool
) -> None:
    """Pack the files of FOLDER into shards (tar files) in the new folder TARGET.

    Files of the same name up to the last dot are one sample. If all files lie in sub-folders, the
    first sub-folder of a file is its class, and the sample gets a number, cls. Shards are written
    completely or not at all; the same command goes on after an interruption.

    \b
      farandole pack images/ shards/
      farandole pack images/ shards/ --size 64MiB
      farandole pack images/ shards/ --samples 1000 --in-order
    """
    if size is not None and samples is not None:
        raise UserError("--size and --samples: give one of them.")
    from farandole.data.pack.plan import make_plan
    from farandole.data.pack.write import MANIFEST, write_shards

    shard_bytes = parse_size(size or "256MiB")
    plan = make_plan(
        folder,
        shard_bytes=shard_bytes,
        shard_samples=samples,
        seed=None if in_order else seed,
    )
    there = write_shards(plan, target, lambda number: click.echo(plan.shard_name(number)))
    if there:
        click.echo(f"{there} of {len(plan.shards)} shards were there already")
    if plan.hidden:
        click.echo(f"{plan.hidden} hidden file(s) were left out")
    if plan.classes:
        names = ", ".join(plan.classes[:5]) + (", …" if len(plan.classes) > 5 else "")
        click.echo(f"{len(plan.classes)} classes: {names} (all of them in {target / MANIFEST})")
    click.echo(f"{plan.samples} samples in {len(plan.shards)} shards. Use them:")
    click.echo(f'fd.data.shards("{plan.pattern(target)}")')

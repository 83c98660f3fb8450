"""`farandole bench data`: is it the input or the model that limits a script?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from farandole import environment
from farandole.bench.ends import check_output, run_placed
from farandole.cli.options import PASS_ON, check_script
from farandole.errors import LaunchError, UserError


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, default=1, show_default=True, help="Number of workers.")
@click.option(
    "--batches", type=int, default=20, show_default=True, help="Batches to time in each part."
)
@click.option(
    "--warmup", type=int, default=3, show_default=True, help="Batches before timing starts."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all figures to FILE.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def data(
    workers: int,
    batches: int,
    warmup: int,
    json_path: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT until its input and its model are measured, and say which of them limits.

    The first loop over a loader of run.loader that trains is measured: with its batches, with one
    batch again and again (the model alone), and without the model (the input alone). Then SCRIPT
    ends.

    \b
      farandole bench data train.py
      farandole bench data -n 2 --batches 50 train.py --epochs 1
    """
    if workers < 1 or batches < 1 or warmup < 0:
        raise UserError(
            f"-n {workers} --batches {batches} --warmup {warmup}: give at least 1, 1 and 0."
        )
    check_script(script)
    from farandole.bench.data import figures_of, lines
    from farandole.files import write_whole
    from farandole.launch.job import Job

    output = check_output("--json", json_path) if json_path else None
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        result = Path(folder, "figures.json")
        chosen = {
            environment.SCRIPT: script,
            environment.RUNS: str(Path(folder, "runs")),
            environment.BENCH_DATA: f"{batches},{warmup},{result}",
        }
        run_placed(
            Job(
                workers=workers,
                command=[script, *arguments],
                environment=chosen,
                rank0_owns_terminal=True,
            ),
            None,
        )
        record = json.loads(result.read_text()) if result.exists() else {}
    if "left_after" in record:
        raise LaunchError(
            f"{script} left its loop after {record['left_after']} batches, before all was "
            f"measured. It takes {warmup + 2 * batches}: give a smaller --batches, or let it run."
        )
    if not record:
        raise LaunchError(
            f"{script} ended before it read a batch of run.loader to train on. Only the loaders of "
            "Farandole can be measured."
        )
    for line in lines(figures_of(record)):
        click.echo(line)
    if output is not None:
        write_whole(output, (json.dumps(record, indent=2) + "\n").encode())

"""`farandole tune`: runs a script many times, and finds the choices that are best for a metric."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

from farandole.cli.host_options import host_options
from farandole.cli.options import (
    PASS_ON,
    check_limits,
    check_script,
    grace_option,
    layout_option,
    seed_option,
    sync_option,
    tell_of_late_options,
)
from farandole.errors import UserError


@click.command(context_settings=PASS_ON)
@click.option("-n", "--workers", type=int, default=1, help="Number of workers of each trial. [1]")
@click.option(
    "--trials",
    type=int,
    help="Number of trials that the study shall have in all, with those of other machines.",
)
@click.option(
    "--metric", metavar="NAME", help="What is optimized. Required. The script must log it."
)
@click.option(
    "--direction",
    type=click.Choice(["maximize", "minimize"]),
    help="[minimize for a loss or an error, else maximize]",
)
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "random", "grid", "cmaes"]),
    default="tpe",
    show_default=True,
    help="How choices are sampled. grid: every combination once, of choices that can be counted.",
)
@click.option(
    "--pruner",
    type=click.Choice(["median", "halving", "hyperband", "none"]),
    default="median",
    show_default=True,
    help="Which trials are stopped early, by what they log.",
)
@click.option(
    "--storage",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of the study: SQLite if it ends in .db, else optuna's journal. An old study "
    "goes on. Several machines may share it. [study.journal in a new folder of --runs]",
)
@click.option(
    "--parallel",
    type=int,
    metavar="K",
    help="Number of trials that run at a time. [as many as the hosts, or the GPUs or cores of this "
    "one, have room for]",
)
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="End a trial that takes longer, its start included. It then counts as failed. [no limit]",
)
@click.option(
    "--ensemble",
    type=int,
    metavar="K",
    help="Also average the predictions of the K best trials, and report their accuracy. The script "
    "hands them over with run.predictions.",
)
@click.option(
    "--populations",
    type=int,
    metavar="N",
    help="Population-based training in place of trials: N members train side by side, and after "
    "each interval the worst go on from weights and changed choices of the best.",
)
@click.option(
    "--interval",
    type=int,
    default=1,
    metavar="EPOCHS",
    help="With --populations: epochs of an interval. [1]",
)
@click.option(
    "--generations", type=int, metavar="N", help="With --populations: number of intervals."
)
@host_options
@sync_option(multiple=True)
@layout_option(multiple=True)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of all runs.",
)
@seed_option()
@grace_option()
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(
    sync: tuple[str, ...],
    layout: tuple[str, ...],
    seed: int | None,
    grace: float,
    metric: str | None,
    script: str,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Run SCRIPT many times, and find the choices that are best for a metric.

    The script says what is open: `lr = run.choose("lr", 1e-4, 1e-1, log=True)`. Every trial is a
    `farandole run` with other values. The last value of the metric that it logs counts. Trials that
    get on badly are stopped early. Strategies and layouts are choices too if several are given.
    The command ends with a table and the command that runs the best trial again.

    \b
      farandole tune -n 2 --trials 40 --metric accuracy train.py
      farandole tune --trials 40 --metric loss --timeout 600 --storage study.db train.py
      farandole tune -n 2 -H node1:4,node2:4 --trials 40 --metric accuracy train.py
      farandole tune -n 4 --trials 20 --metric accuracy --sync allreduce --sync daso train.py
    """
    check_limits(None, grace)
    check_script(script)
    needed = {"--metric": metric, "--trials": given["trials"] or given["populations"]}
    tell_of_late_options(arguments, [name for name, value in needed.items() if value is None])
    if metric is None:
        raise UserError("which metric counts? Give --metric accuracy, say, before the script.")
    if importlib.util.find_spec("optuna") is None:
        raise UserError("farandole tune needs optuna: pip install 'farandole[tune]'.")

    from farandole.tune.options import TuneOptions
    from farandole.tune.preloading import begin_preloading

    options = TuneOptions(
        command=(script, *arguments),
        syncs=sync,
        layouts=layout,
        seed=seed or 0,
        grace=grace,
        metric=metric,
        **given,
    )
    options.check()
    with contextlib.closing(begin_preloading(options)) as warm:
        from farandole.tune.tune import run_tune

        code = run_tune(options, warm)
    sys.exit(code)

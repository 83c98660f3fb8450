"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from farandole.errors import UserError
from farandole.sync.registry import STRATEGIES

PASS_ON = {"allow_interspersed_args": False}
"""What follows the script belongs to the script."""


class OptionWithNames(click.Option):
    """An option whose help lists names, for `{names}`. They are looked up when help is asked for,
    because what knows them takes a while to import."""

    def __init__(self, *args: Any, names: Callable[[], Iterable[str]], **settings: Any) -> None:
        self._names = names
        super().__init__(*args, **settings)

    @property
    def help(self) -> str | None:
        return self._help and self._help.replace("{names}", ", ".join(self._names()))

    @help.setter
    def help(self, text: str | None) -> None:
        self._help = text


def schedules() -> tuple[str, ...]:
    """The schedules of a layout with stages."""
    from farandole.schedule.pipelines import schedule_names

    return schedule_names()


def sync_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Give it once for each strategy to compare." if multiple else " [allreduce]"
    return click.option(
        "--sync",
        metavar="STRATEGY",
        multiple=multiple,
        help=f"How replicas stay in step: {', '.join(STRATEGIES)}; "
        f"with options as in local:every=8.{again}",
    )


def layout_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Give it once for each layout to compare." if multiple else ""
    return click.option(
        "--layout",
        cls=OptionWithNames,
        names=schedules,
        metavar="LAYOUT",
        multiple=multiple,
        help="Where a replica of the model lives: whole on every worker, or in stages on several, "
        "as in stages=4,microbatches=8,schedule=gpipe, or on tiles of the image, as in tiles=2x2. "
        f"Schedules: {{names}}.{again} [the script's, else whole]",
    )


def hosts_option() -> Callable[[Any], Any]:
    return click.option(
        "--hosts",
        metavar="N",
        help="Pretend that the workers are on N hosts, or on hosts with these numbers of workers, "
        "such as 3,1. For DASO, which needs several hosts.",
    )


def seed_option(default: int | None = None) -> Callable[[Any], Any]:
    return click.option(
        "--seed",
        type=int,
        default=default,
        help="Random seed, instead of fd.init(seed=…). [0]",
    )


def check_script(script: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    hint = ""
    if path.parent.is_dir():
        from farandole.errors import nearest

        scripts = [str(p) for p in path.parent.glob("*.py")]
        hint = f" {nearest(script, scripts)}" if scripts else ""
    raise UserError(f"there is no script {script!r} here ({Path.cwd()}).{hint}")


def stall_option() -> Callable[[Any], Any]:
    return click.option(
        "--stall",
        type=float,
        metavar="SECONDS",
        help="Report a worker that makes no step for this long, with its Python stack.",
    )


def grace_option() -> Callable[[Any], Any]:
    return click.option(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="When the job is stopped: how long workers have to save and exit. [30]",
    )


def check_limits(stall: float | None, grace: float) -> None:
    """Raises `UserError` for what is no time to wait."""
    if stall is not None and not stall > 0:
        raise UserError(f"--stall {stall:g}: give the seconds without a step, above 0.")
    if not 0 < grace < float("inf"):
        raise UserError(f"--grace {grace:g}: give a number of seconds above 0.")

"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from farandole.errors import UserError
from farandole.network_link import NetworkLink
from farandole.sync.registry import STRATEGIES

PASS_ON = {"allow_interspersed_args": False}
"""Words after the script are arguments of the script."""


class OptionWithNames(click.Option):
    """An option whose help lists names in place of `{names}`.

    The names are looked up only when help is shown: the module that knows them is slow to import.
    """

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
    again = " Repeat it for each strategy to compare." if multiple else " [allreduce]"
    return click.option(
        "--sync",
        metavar="STRATEGY",
        multiple=multiple,
        help=f"Strategy that keeps replicas in step: {', '.join(STRATEGIES)}; "
        f"with options, as in local:every=8.{again}",
    )


def layout_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Repeat it for each layout to compare." if multiple else ""
    return click.option(
        "--layout",
        cls=OptionWithNames,
        names=schedules,
        metavar="LAYOUT",
        multiple=multiple,
        help="How the model is divided over workers: whole (each worker has all of it), stages, as "
        "in stages=4,microbatches=8,schedule=gpipe, or tiles of the image, as in tiles=2x2. "
        f"Schedules: {{names}}.{again} [the script's, else whole]",
    )


def pretend_hosts_option() -> Callable[[Any], Any]:
    return click.option(
        "--pretend-hosts",
        metavar="N",
        help="Treat the workers as if they ran on N hosts, or on hosts with these numbers of "
        "workers, such as 3,1. Use it to try DASO, which needs several hosts. [one host]",
    )


def link_option() -> Callable[[Any], Any]:
    return click.option(
        "--link",
        metavar="RATE[,DELAY]",
        help="Simulate a link of this rate and delay between the hosts of --pretend-hosts, such as "
        "200mbit,1ms. Needs no root. It is marked as simulated in every result. [no limit]",
    )


def check_link(link: str | None, pretend_hosts: str | None) -> None:
    """Raises `UserError` for what is no link, and where there is nothing to link."""
    if link is None:
        return
    try:
        NetworkLink.read(link)
    except UserError as error:
        raise UserError(f"--link {link}: {error}") from None
    if pretend_hosts is None:
        raise UserError(
            f"--link {link} is between pretended hosts of this machine: give --pretend-hosts 2, "
            "say. (For real TCP between emulated hosts see `farandole emulate`, which needs root.)"
        )


def price_option() -> Callable[[Any], Any]:
    return click.option(
        "--price",
        type=float,
        metavar="PRICE",
        help="Price of one worker for one hour, in any unit of money, such as 2.5. The results "
        "then have what each lane cost.",
    )


def seed_option() -> Callable[[Any], Any]:
    return click.option(
        "--seed",
        type=int,
        help="Random seed. It overrides fd.init(seed=…). [0]",
    )


def choose_option() -> Callable[[Any], Any]:
    return click.option(
        "--choose",
        metavar="NAME=VALUE",
        multiple=True,
        help="Value of a choice that the script leaves open with run.choose, such as lr=0.01. "
        "Repeat it for several. [the script's default]",
    )


def checkpoint_option(place: str = "; to=FOLDER or to=s3://BUCKET/PATH") -> Callable[[Any], Any]:
    return click.option(
        "--checkpoint",
        metavar="POLICY",
        help="Save checkpoints automatically: every=10min, every=500steps or every=auto (by the "
        "time that a save takes and mtbf=6h, or the failures so far); keep=3 newest, and the best, "
        f"as in best=accuracy or best=loss:min{place}. [the script's, else none]",
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


def tell_of_late_options(arguments: Iterable[str], missing: Iterable[str]) -> None:
    """Where an option of ours is `missing`, and the script is given one of the same name."""
    words = [word.partition("=")[0] for word in arguments]
    late = next((name for name in missing if name in words), None)
    if late is not None:
        click.echo(
            f"farandole: {late} after the script is the script's own; ours goes before it", err=True
        )


def stall_option() -> Callable[[Any], Any]:
    return click.option(
        "--stall",
        type=float,
        metavar="SECONDS",
        help="Report a worker that takes no step for so many seconds, with its Python stack. [off]",
    )


def grace_option() -> Callable[[Any], Any]:
    return click.option(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="How long workers may take to save and exit when the job is stopped, in seconds. [30]",
    )


def check_limits(stall: float | None, grace: float) -> None:
    """Raises `UserError` for what is no time to wait."""
    if stall is not None and not stall > 0:
        raise UserError(f"--stall {stall:g}: give the seconds without a step, above 0.")
    if not 0 < grace < float("inf"):
        raise UserError(f"--grace {grace:g}: give a number of seconds above 0.")

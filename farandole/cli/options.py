"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from farandole.errors import UserError

KINDS = (
    "allreduce",
    "lagged",
    "local",
    "postlocal",
    "adacomm",
    "diloco",
    "federated",
    "daso",
    "hogwild",
    "server",
    "downpour",
)
"""The strategies, by name; here as text, because help must not wait for torch."""

SCHEDULES = ("layer", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "pipedream", "2bw")
"""The schedules of a layout with stages; as text, for the same reason."""

PASS_ON = {"allow_interspersed_args": False}
"""What follows the script belongs to the script."""


def sync_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Give it once for each strategy to compare." if multiple else " [allreduce]"
    return click.option(
        "--sync",
        metavar="STRATEGY",
        multiple=multiple,
        help=f"How replicas stay in step: {', '.join(KINDS)}; with options as in local:every=8."
        + again,
    )


def layout_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Give it once for each layout to compare." if multiple else ""
    return click.option(
        "--layout",
        metavar="LAYOUT",
        multiple=multiple,
        help="Where a replica of the model lives: whole on every worker, or in stages on several, "
        f"as in stages=4,microbatches=8,schedule=gpipe, or on tiles of the image, as in tiles=2x2. "
        f"Schedules: {', '.join(SCHEDULES)}."
        f"{again} [the script's, else whole]",
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

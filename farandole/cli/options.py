"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from farandole.errors import UserError

PASS_ON = {"allow_interspersed_args": False}
"""What follows the script belongs to the script."""


def sync_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    again = " Give it once for each strategy to compare." if multiple else " [allreduce]"
    return click.option(
        "--sync",
        metavar="STRATEGY",
        multiple=multiple,
        help="How replicas stay in step, such as allreduce or allreduce:bucket_mib=5." + again,
    )


def seed_option(default: int | None = None) -> Callable[[Any], Any]:
    return click.option(
        "--seed", type=int, default=default, help="Random seed; wins over fd.init(seed=…). [0]"
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

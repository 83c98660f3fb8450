"""Strategies and layouts as choices of a study: `--sync A --sync B --layout C`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farandole.errors import UserError
from farandole.sync import parse
from farandole.train.settings import check_goes_with, check_workers, read_layout
from farandole.tune.options import TuneOptions

NAMES = ("sync", "layout")


def scheme_spaces(options: TuneOptions) -> dict[str, dict[str, Any]]:
    """The choices that are made before a trial starts. One value is no choice, but is recorded."""
    given = {"sync": options.syncs, "layout": options.layouts}
    return {name: {"options": list(values)} for name, values in given.items() if values}


def check_schemes(options: TuneOptions) -> None:
    """Raises `UserError` for a combination that cannot run, before the first trial."""
    strategies = [parse(text) for text in options.syncs]
    for text in options.layouts:
        layout = read_layout(text)
        check_workers(layout, options.workers)
        for strategy in strategies:
            check_goes_with(layout, strategy)


def check_name(name: str, options: TuneOptions) -> None:
    """Raises `UserError` for a choice of the script that is one of the command line's."""
    if name in scheme_spaces(options):
        raise UserError(
            f'run.choose("{name}", …): --{name} is a choice of this study already. Give the '
            "script's another name."
        )


def scheme_words(chosen: Mapping[str, Any]) -> list[str]:
    """Options of `farandole run`."""
    return [word for name in NAMES if name in chosen for word in (f"--{name}", str(chosen[name]))]

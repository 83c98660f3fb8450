"""The options that say on which hosts a command's workers run. `HostOptions` holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from farandole.launch.placement.placement import HostOptions

_OPTIONS = (
    click.option(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,…",
        help="Hosts, and the number of workers that each may have. Other hosts are reached by ssh, "
        "nodes of a Slurm job by srun. "
        "[those of the Slurm, PBS or LSF job, else this host]",
    ),
    click.option(
        "--hostfile",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with the hosts, one per line: `host slots=2`. A file whose name ends in .toml "
        "has a [[host]] with name, slots, port and user for each.",
    ),
    click.option("--ssh-port", type=int, help="Port of ssh on other hosts. [ssh's own]"),
    click.option(
        "--ssh-identity-file",
        # ssh itself would go on with other keys, and say so where nobody looks.
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Private key for ssh. [ssh's own]",
    ),
    click.option(
        "--network-interfaces",
        metavar="NAME,…",
        multiple=True,
        help="Network interfaces that connect the hosts. [those that route to them]",
    ),
)


def host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, which `command` gets as one argument, `where`."""

    @functools.wraps(command)
    def with_where(**given: Any) -> Any:
        where = HostOptions(**{field.name: given.pop(field.name) for field in fields(HostOptions)})
        return command(where=where, **given)

    for option in reversed(_OPTIONS):
        with_where = option(with_where)
    # click keeps the options of a function on it; `wraps` has copied those that were there before.
    return with_where

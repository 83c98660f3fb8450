"""The options of `farandole run` for jobs whose workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import click


class ElasticOptions(Protocol):
    """As given; None: not given."""

    @property
    def restarts(self) -> int: ...
    @property
    def min_workers(self) -> int | None: ...
    @property
    def max_workers(self) -> int | None: ...
    @property
    def replace_stragglers(self) -> bool: ...
    @property
    def elastic_wait(self) -> float: ...
    @property
    def host_silence(self) -> float: ...


def elastic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def is_elastic(options: ElasticOptions) -> bool:
    """Whether the others shall go on without a worker that is lost."""
    return options.min_workers is not None or options.restarts > 0


_OPTIONS = (
    click.option(
        "--min",
        "min_workers",
        type=int,
        metavar="N",
        help="Go on without workers that are lost, as long as N are left. With fewer, wait for "
        "replacements. [1 with --restarts]",
    ),
    click.option(
        "--max",
        "max_workers",
        type=int,
        metavar="N",
        help="With --min or --restarts: the most workers that the job may have. [-n]",
    ),
    click.option(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="Replace workers that are lost, up to R times in the whole job. With a layout, with "
        "another strategy than allreduce, or on GPUs: start all workers again from the last "
        "checkpoint, up to R times. With parameter servers: restart each failed worker up to R "
        "times. [0]",
    ),
    click.option(
        "--replace-stragglers",
        is_flag=True,
        help="With --restarts: also replace a worker that was three times slower than the median "
        "for a minute. Otherwise it is only named.",
    ),
    click.option(
        "--elastic-wait",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="How long fewer than --min workers wait for replacements. [600]",
    ),
    click.option(
        "--host-silence",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="With --min or --restarts: another host that was not heard of for so long counts as "
        "lost, and ends its workers. [30]",
    ),
)

"""The flags of horovodrun 0.28 by name. What they do is elsewhere: see `start`.

A flag that is not given is None, so that it can be told from one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        import farandole
        from farandole.horovod import __version__

        click.echo(f"{__version__} (Farandole {farandole.__version__})")
        context.exit()


def _flag(*names: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*names, default=None, **attributes)


def _switch(*names: str, **attributes: Any) -> Callable[[F], F]:
    """One that is there or not."""
    return _flag(*names, is_flag=True, **attributes)


def _file(*names: str, **attributes: Any) -> Callable[[F], F]:
    return _flag(*names, type=click.Path(path_type=Path), metavar="FILE", **attributes)


_FLAGS = (
    click.option("-v", "--version", is_flag=True, expose_value=False, is_eager=True,
                 callback=_version, help="Show the version and end."),
    _flag("-np", "--num-proc", type=int, metavar="N", help="How many workers there are."),
    _switch("-cb", "--check-build", help="Show what is here, and end."),
    # Hosts
    _flag("-H", "--hosts", metavar="HOST:SLOTS,…", help="The hosts, and how many workers each "
          "may have. [localhost:N]"),
    _file("-hostfile", "--hostfile", help="The same in a file, a host a line: `host slots=2`."),
    _file("--host-discovery-script", help="Elastic: a program that prints the hosts there are now, "
          "`host:slots` a line."),
    _flag("-p", "--ssh-port", type=int, help="The port of ssh on other hosts."),
    _file("-i", "--ssh-identity-file", help="The private key for ssh."),
    _flag("--network-interfaces", "--network-interface", "interfaces", multiple=True,
          metavar="NAME,…", help="The networks that the hosts share. [what leads to them]"),
    _flag("--start-timeout", type=int, metavar="S", help="Seconds to reach another host. [30]"),
    _switch("--disable-cache", help="No effect."),
    # Controllers
    _switch("--gloo", "gloo", help="Start the workers ourselves. This is the default."),
    _switch("--mpi", "mpi", help="Start them by mpirun."),
    _switch("--jsrun", "jsrun", help="Not supported."),
    _flag("--mpi-args", metavar="WORDS", help="More words for mpirun: --mpi-args='--map-by node'"),
    _flag("--binding-args", metavar="WORDS", help="How mpirun binds workers. [--bind-to none]"),
    _switch("--tcp", "tcp", help="No effect."),
    _switch("--mpi-threads-disable/--no-mpi-threads-disable", help="No effect."),
    # Elastic
    _flag("--min-np", "--min-num-proc", "min_np", type=int, metavar="N", help="Elastic: go on with "
          "so many workers. [-np]"),
    _flag("--max-np", "--max-num-proc", "max_np", type=int, metavar="N", help="Elastic: never have "
          "more workers. [no limit]"),
    _flag("--slots-per-host", "--slots", "slots", type=int, metavar="N", help="Elastic: slots of "
          "hosts that are discovered without a number. [1]"),
    _flag("--elastic-timeout", type=int, metavar="S", help="Elastic: seconds to wait for enough "
          "workers. [600]"),
    _flag("--reset-limit", type=int, metavar="N", help="Elastic: end after so many changes of "
          "workers. [no limit]"),
    _flag("--blacklist-cooldown-range", "cooldown", type=(int, int), metavar="MIN MAX",
          help="No effect."),
    # Output
    _switch("--verbose", help="Say what is started, and where."),
    _flag("--output-filename", type=click.Path(path_type=Path), metavar="FOLDER", help="Keep what "
          "the workers write in FOLDER/rank.N/stdout and stderr, too."),
    _switch("-prefix-timestamp", "--prefix-output-with-timestamp", "timed",
            help="Begin each line with the time."),
    _flag("--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), help="How much the "
          "workers log. [WARNING]"),
    _switch("--log-with-timestamp/--log-without-timestamp", help="No effect."),
    _switch("--no-log-hide-timestamp/--log-hide-timestamp", hidden=True),
    # How tensors travel
    _file("--config-file", help="Flags of this kind, in Horovod's YAML. The command line wins."),
    _flag("--fusion-threshold-mb", type=int, metavar="MB", help="Fuse tensors up to this size; 0: "
          "none. [8]"),
    _flag("--cycle-time-ms", type=float, metavar="MS", help="The pause between rounds. [1]"),
    _flag("--cache-capacity", type=int, metavar="N", help="How many tensors' names are "
          "remembered. [1024]"),
    _switch("--hierarchical-allreduce/--no-hierarchical-allreduce", help="No effect."),
    _switch("--hierarchical-allgather/--no-hierarchical-allgather", help="No effect."),
    _flag("--num-nccl-streams", type=int, help="No effect."),
    _flag("--thread-affinity", type=int, help="No effect."),
    _flag("--gloo-timeout-seconds", type=int, metavar="S", help="Wait so long for other ranks. "
          "[120]"),
    # Autotuning, the timeline, stalls
    _switch("--autotune/--no-autotune", help="Find, while training, how much to "
            "fuse and when to begin."),
    _file("--autotune-log-file", help="Where autotuning keeps what it has tried."),
    _flag("--autotune-warmup-samples", type=int, help="No effect."),
    _flag("--autotune-steps-per-sample", type=int, help="No effect."),
    _flag("--autotune-bayes-opt-max-samples", type=int, help="No effect."),
    _flag("--autotune-gaussian-process-noise", type=float, help="No effect."),
    _file("--timeline-filename", help="Record what happened when, for https://ui.perfetto.dev."),
    _switch("--timeline-mark-cycles/--no-timeline-mark-cycles", help="Rounds too."),
    _switch("--no-stall-check/--stall-check", "no_stall_check", help="Do not say which ranks "
            "others wait for."),
    _flag("--stall-check-warning-time-seconds", type=int, metavar="S", help="Say it after so long. "
          "[60]"),
    _flag("--stall-check-shutdown-time-seconds", type=int, metavar="S", help="End the job after so "
          "long; 0: never. [0]"),
)  # fmt: skip


def horovod_flags(function: F) -> F:
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function

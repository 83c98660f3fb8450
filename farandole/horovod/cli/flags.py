"""The flags of horovodrun 0.28. The file `start` acts on them.

A flag that is not given is None. So a configuration file can fill in exactly those flags.
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
                 callback=_version, help="Print the version, and exit."),
    _flag("-np", "--num-proc", type=int, metavar="N", help="Number of workers. Required."),
    _switch("-cb", "--check-build", help="List the available frameworks and backends, "
            "and exit."),
    # Hosts
    _flag("-H", "--hosts", metavar="HOST:SLOTS,…", help="Hosts, and the number of workers that "
          "each may have. [localhost:N]"),
    _file("-hostfile", "--hostfile", help="File with the hosts, one per line: `host slots=2`."),
    _file("--host-discovery-script", help="Elastic: program that prints the available hosts, one "
          "per line: `host:slots`."),
    _flag("-p", "--ssh-port", type=int, help="Port of ssh on other hosts. [ssh's own]"),
    _file("-i", "--ssh-identity-file", help="Private key for ssh. [ssh's own]"),
    _flag("--network-interfaces", "--network-interface", "interfaces", multiple=True,
          metavar="NAME,…", help="Network interfaces that connect the hosts. [those that route "
          "to them]"),
    _flag("--start-timeout", type=int, metavar="S", help="Seconds to wait for a connection "
          "to another host. [30]"),
    _switch("--disable-cache", help="No effect."),
    # Controllers
    _switch("--gloo", "gloo", help="Start the workers without MPI. This is the default."),
    _switch("--mpi", "mpi", help="Start the workers with mpirun."),
    _switch("--jsrun", "jsrun", help="Not supported."),
    _flag("--mpi-args", metavar="WORDS", help="Further arguments of mpirun, as in "
          "--mpi-args='--map-by node'."),
    _flag("--binding-args", metavar="WORDS", help="Arguments of mpirun that bind workers to "
          "cores. [--bind-to none]"),
    _switch("--tcp", "tcp", help="No effect."),
    _switch("--mpi-threads-disable/--no-mpi-threads-disable", help="No effect."),
    # Elastic
    _flag("--min-np", "--min-num-proc", "min_np", type=int, metavar="N", help="Elastic: minimum "
          "number of workers to train with. [-np]"),
    _flag("--max-np", "--max-num-proc", "max_np", type=int, metavar="N", help="Elastic: maximum "
          "number of workers. [no limit]"),
    _flag("--slots-per-host", "--slots", "slots", type=int, metavar="N", help="Elastic: slots of "
          "each host that the discovery script prints without a number. [1]"),
    _flag("--elastic-timeout", type=int, metavar="S", help="Elastic: seconds to wait until there "
          "are enough workers. [600]"),
    _flag("--reset-limit", type=int, metavar="N", help="Elastic: maximum number of times that the "
          "set of workers may change. [no limit]"),
    _flag("--blacklist-cooldown-range", "cooldown", type=(int, int), metavar="MIN MAX",
          help="No effect."),
    # Output
    _switch("--verbose", help="Print which processes are started, and on which hosts."),
    _flag("--output-filename", type=click.Path(path_type=Path), metavar="FOLDER", help="Also write "
          "the output of each worker to FOLDER/rank.N/stdout and stderr."),
    _switch("-prefix-timestamp", "--prefix-output-with-timestamp", "timed",
            help="Start each line of output with the time."),
    _flag("--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), help="Least severe "
          "level that the workers log. [WARNING]"),
    _switch("--log-with-timestamp/--log-without-timestamp", help="No effect."),
    _switch("--no-log-hide-timestamp/--log-hide-timestamp", hidden=True),
    # How tensors travel
    _file("--config-file", help="YAML file with flags, in Horovod's format. The command line takes "
          "precedence over it."),
    _flag("--fusion-threshold-mb", type=int, metavar="MB", help="Fuse tensors up to this size, in "
          "MiB. 0: do not fuse. [8]"),
    _flag("--cycle-time-ms", type=float, metavar="MS", help="Pause between two rounds, in "
          "milliseconds. [1]"),
    _flag("--cache-capacity", type=int, metavar="N", help="Number of tensor names to "
          "remember. [1024]"),
    _switch("--hierarchical-allreduce/--no-hierarchical-allreduce", help="No effect."),
    _switch("--hierarchical-allgather/--no-hierarchical-allgather", help="No effect."),
    _flag("--num-nccl-streams", type=int, help="No effect."),
    _flag("--thread-affinity", type=int, help="No effect."),
    _flag("--gloo-timeout-seconds", type=int, metavar="S", help="How long a rank waits for others, "
          "in seconds. [120]"),
    # Autotuning, the timeline, stalls
    _switch("--autotune/--no-autotune", help="Tune during training how much to fuse, "
            "and when to start reducing. [off]"),
    _file("--autotune-log-file", help="File in which autotuning records what it has tried."),
    _flag("--autotune-warmup-samples", type=int, help="No effect."),
    _flag("--autotune-steps-per-sample", type=int, help="No effect."),
    _flag("--autotune-bayes-opt-max-samples", type=int, help="No effect."),
    _flag("--autotune-gaussian-process-noise", type=float, help="No effect."),
    _file("--timeline-filename", help="Write a timeline to this file. Open it at https://ui.perfetto.dev."),
    _switch("--timeline-mark-cycles/--no-timeline-mark-cycles", help="Mark the rounds in the "
            "timeline. [off]"),
    _switch("--no-stall-check/--stall-check", "no_stall_check", help="Do not report ranks that "
            "others wait for."),
    _flag("--stall-check-warning-time-seconds", type=int, metavar="S", help="Report a rank that "
          "others have waited for this long, in seconds. [60]"),
    _flag("--stall-check-shutdown-time-seconds", type=int, metavar="S", help="End the job when "
          "ranks have waited this long, in seconds. 0: never. [0]"),
)  # fmt: skip


def horovod_flags(function: F) -> F:
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function

"""`farandole run --per-gpu`: what does not go with it, and the GPUs that its workers share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import click

from farandole.environment import GPU_TRIAL, PER_GPU
from farandole.errors import UserError
from farandole.worker.signals import Stopped, exit_code_of

if TYPE_CHECKING:
    from farandole.launch.gpu.sharing import GpuSharing
    from farandole.launch.placement.placement import HostOptions


class Options(Protocol):
    """Of all options those that matter here."""

    @property
    def where(self) -> HostOptions: ...
    @property
    def workers(self) -> int | None: ...
    @property
    def per_gpu(self) -> str | None: ...
    @property
    def gpu_threads(self) -> float | None: ...
    @property
    def min_workers(self) -> int | None: ...
    @property
    def max_workers(self) -> int | None: ...
    @property
    def replace_stragglers(self) -> bool: ...
    @property
    def servers(self) -> str | None: ...
    @property
    def horovod(self) -> bool: ...


def check_per_gpu(options: Options) -> None:
    """Raises `UserError` for what cannot be, before anything is looked at or started."""
    if options.per_gpu is None:
        if options.gpu_threads is not None:
            raise UserError(
                f"--gpu-threads {options.gpu_threads:g} is for workers that share a GPU. Say with "
                "--per-gpu how many do, or leave it out."
            )
        return
    from farandole.launch.gpu.sharing import check_threads, parse_per_gpu

    given = f"--per-gpu {options.per_gpu}"
    per_gpu = parse_per_gpu(options.per_gpu)
    is_auto = per_gpu is None
    check_threads(options.gpu_threads)
    # A trial of one worker goes with others that are limited.
    if per_gpu == 1 and options.gpu_threads is not None and GPU_TRIAL not in os.environ:
        raise UserError(
            f"--gpu-threads {options.gpu_threads:g} and {given}: one worker has its GPU for "
            "itself, and is not limited. Leave --gpu-threads out."
        )
    refuse_hosts(given, options.where)
    if options.horovod:
        raise UserError(
            f"{given} with --horovod: such scripts choose their GPU by hvd.local_rank(), which "
            "counts workers and not GPUs. Leave out --per-gpu, or call fd.init() in the script."
        )
    _refuse_elastic(options, given)
    if is_auto and options.workers is not None:
        raise UserError(
            f"-n {options.workers} and {given}: auto chooses how many workers there are. Leave one "
            "of the two out."
        )
    if is_auto and options.servers is not None and options.servers.startswith("tcp:"):
        raise UserError(
            f"{given} and --servers {options.servers}: trials would train the model of servers "
            "that run already. Give a number, such as --per-gpu 4, or let the job start its own "
            "servers: --servers 1."
        )


def _refuse_elastic(options: Options, given: str) -> None:
    refused = {
        "--min": options.min_workers is not None,
        "--max": options.max_workers is not None,
        "--replace-stragglers": options.replace_stragglers,
    }
    for name, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{name} and {given}: workers that share a GPU do not come and go one by one. "
                f"Leave {name} out; --restarts R starts all again when one is lost."
            )


def find_sharing(options: Options) -> GpuSharing | None:
    """The GPUs that the workers share; None: without --per-gpu. Raises `UserError`."""
    if options.per_gpu is None:
        # This launcher may be a worker of a job with --per-gpu, and its own workers are not.
        os.environ.pop(PER_GPU, None)
        return None
    from farandole.launch.gpu.sharing import parse_per_gpu, plan_sharing

    refuse_allocation(f"--per-gpu {options.per_gpu}", options.where)
    per_gpu = parse_per_gpu(options.per_gpu)
    assert per_gpu is not None, "auto has become a number"
    return plan_sharing(per_gpu, options.gpu_threads, options.workers)


def choose_per_gpu(options: Options, words: Sequence[str]) -> int:
    """Tries the job with several numbers of workers a GPU, and returns the fastest.

    `words` are those of the command line, less what is different in a trial. Raises `UserError` or
    `LaunchError` where no number works.
    """
    from farandole.launch.gpu.trials import find_fastest

    refuse_allocation(f"--per-gpu {options.per_gpu}", options.where)
    try:
        return find_fastest(words)
    except Stopped as stopped:
        _leave(stopped.name)


def _leave(signal: str) -> NoReturn:
    click.echo(f"farandole: stopped by {signal}; no worker is left", err=True)
    sys.exit(exit_code_of(signal))


def refuse_hosts(given: str, where: HostOptions) -> None:
    """`given`: how --per-gpu was asked for. Raises `UserError` where hosts are named."""
    named = where.hosts or where.hostfile
    if named:
        raise UserError(
            f"{given} and hosts ({named}): MPS daemons are started on this host only. Leave the "
            "hosts out, or --per-gpu: then each worker on them has a GPU of its own."
        )


def refuse_allocation(given: str, where: HostOptions) -> None:
    """The nodes of a scheduler's job are the hosts of a job that names none."""
    from farandole.launch.placement.placement import place

    found = place(where, None)
    if found is not None and found.others:
        raise UserError(
            f"{given} in an allocation with other hosts ({', '.join(found.others)}): MPS daemons "
            "are started on this host only. Ask for one node, or leave --per-gpu out: then each "
            "worker has a GPU of its own."
        )

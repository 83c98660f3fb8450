"""From flags to a job: on this host, on several by ssh, by mpirun, or elastic."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from farandole.errors import UserError
from farandole.horovod.aliases import shim_variables
from farandole.horovod.cli.elastic import start_elastic
from farandole.horovod.cli.variables import (
    NO_EFFECT,
    default_seconds,
    horovod_variables,
    spelling,
)
from farandole.launch.backends.mpi import mpirun
from farandole.launch.backends.mpi.command import meeting_place, mpi_words
from farandole.launch.backends.ssh.channel import Ssh, answer_seconds
from farandole.launch.hosts import HERE, gathered, parse_hosts, place_workers, read_hostfile
from farandole.launch.job import Job
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.outcome_text import print_outcome
from farandole.launch.rank_variables import horovod_rank_variables
from farandole.topology import Topology

_ANOTHER_MPIRUN = (
    "Start it yourself, with the variables of `farandole horovodrun --verbose`, or use --gloo."
)
_ONLY_MPI = ("mpi_args", "binding_args")
_ONLY_ELASTIC = ("max_np", "slots", "elastic_timeout", "reset_limit")
_ONLY_FIXED = ("output_filename", "timed")
_ONLY_OTHER_HOSTS = ("ssh_port", "ssh_identity_file", "interfaces", "start_timeout")


@dataclass(frozen=True)
class LaunchPlan:
    """A job that stays as it is."""

    topology: Topology
    program: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    ssh: Ssh
    interfaces: tuple[str, ...]
    output: Path | None
    timed: bool

    @property
    def is_here(self) -> bool:
        return all(host.name == HERE for host in self.topology.hosts)


def start(flags: Mapping[str, Any], command: Sequence[str]) -> None:
    """Runs the job to its end, and ends as it did."""
    _check(flags)
    elastic = flags["min_np"] is not None or flags["host_discovery_script"] is not None
    variables = {**shim_variables(), **horovod_variables(flags)}
    whole = [find_program(command[0]), *command[1:]]
    if elastic:
        _tell_no_effect(flags, {*_ONLY_MPI, *_ONLY_FIXED})
        if flags["verbose"]:
            _tell_start(variables, whole)
        ways = _ssh(flags), _interfaces(flags)
        sys.exit(start_elastic(flags, _hosts(flags), whole, variables, *ways))
    plan = _plan(flags, whole, variables)
    idle = {
        *(() if flags["mpi"] else _ONLY_MPI),
        *_ONLY_ELASTIC,
        *(_ONLY_OTHER_HOSTS if plan.is_here else ()),
    }
    _tell_no_effect(flags, idle)
    sys.exit(_run_mpi(flags, plan) if flags["mpi"] else _run(flags, plan))


def _check(flags: Mapping[str, Any]) -> None:
    if flags["jsrun"]:
        raise UserError("--jsrun is not supported. Under LSF use --mpi, or jsrun itself.")
    if flags["gloo"] and flags["mpi"]:
        raise UserError("--gloo and --mpi: choose one.")
    sources = ("hosts", "hostfile", "host_discovery_script")
    given = [spelling(name) for name in sources if flags[name] is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them.")
    if flags["num_proc"] is None:
        raise UserError("-np is missing: how many workers shall there be? -np 2, say.")
    if flags["num_proc"] < 1:
        raise UserError(f"-np {flags['num_proc']}: a job needs at least 1 worker.")


def _tell_no_effect(flags: Mapping[str, Any], idle: set[str]) -> None:
    why = {
        **NO_EFFECT,
        **dict.fromkeys(_ONLY_MPI, "it is for --mpi"),
        **dict.fromkeys(_ONLY_ELASTIC, "it is for elastic jobs: give --min-np too"),
        **dict.fromkeys(_ONLY_FIXED, "workers of an elastic job come and go, and so do ranks"),
        **dict.fromkeys(_ONLY_OTHER_HOSTS, "all workers are on this host"),
    }
    for name in (*NO_EFFECT, *(name for name in why if name in idle)):
        if flags[name] not in (None, (), False):
            click.echo(f"horovodrun: {spelling(name)} has no effect: {why[name]}", err=True)


def _hosts(flags: Mapping[str, Any]) -> dict[str, int] | None:
    """None where none are given."""
    if flags["hosts"] is not None:
        return gathered(parse_hosts(flags["hosts"], "-H"))
    if flags["hostfile"] is not None:
        return gathered(read_hostfile(flags["hostfile"]))
    return None


def _plan(
    flags: Mapping[str, Any], command: Sequence[str], variables: Mapping[str, str]
) -> LaunchPlan:
    topology = place_workers(_hosts(flags) or {HERE: flags["num_proc"]}, flags["num_proc"])
    return LaunchPlan(
        topology,
        command[0],
        tuple(command[1:]),
        variables,
        _ssh(flags),
        _interfaces(flags),
        flags["output_filename"],
        bool(flags["timed"]),
    )


def _ssh(flags: Mapping[str, Any]) -> Ssh:
    timeout = flags["start_timeout"] or default_seconds("HOROVOD_START_TIMEOUT", 30)
    return Ssh(flags["ssh_port"], flags["ssh_identity_file"], timeout)


def _interfaces(flags: Mapping[str, Any]) -> tuple[str, ...]:
    names = [name for given in flags["interfaces"] or () for name in given.split(",")]
    return tuple(dict.fromkeys(names))


def find_program(name: str) -> str:
    """Where the first word of the command is. Raises `UserError` when it is nowhere."""
    found = shutil.which(name)
    if found is None:
        hint = f" A script needs its interpreter: python {name}" if name.endswith(".py") else ""
        raise UserError(f"there is no program {name!r} to run.{hint}")
    return found


def _run(flags: Mapping[str, Any], plan: LaunchPlan) -> int:
    job = Job(
        workers=plan.topology.size,
        command=plan.arguments,
        environment=plan.variables,
        program=plan.program,
        per_rank=[
            horovod_rank_variables(plan.topology, rank) for rank in range(plan.topology.size)
        ],
        output=plan.output,
        timed_output=plan.timed,
    )
    if flags["verbose"]:
        _tell_plan(plan, [plan.program, *plan.arguments])
    outcome = launch_on_hosts(
        job,
        plan.topology,
        plan.ssh,
        plan.interfaces,
        connect_seconds=answer_seconds(plan.ssh),
    )
    print_outcome(outcome, job.workers)
    return outcome.exit_code


def _run_mpi(flags: Mapping[str, Any], plan: LaunchPlan) -> int:
    variables = {**plan.variables, **meeting_place(plan.topology, plan.interfaces)}
    words = mpi_words(
        mpirun.require("--mpi", _ANOTHER_MPIRUN),
        plan.topology,
        [plan.program, *plan.arguments],
        variables,
        ssh=plan.ssh,
        interfaces=plan.interfaces,
        output=plan.output,
        timed=plan.timed,
        mpi_args=flags["mpi_args"] or "",
        binding_args=flags["binding_args"] or "",
    )
    if flags["verbose"]:
        _tell_plan(plan, words)
    return mpirun.run_ranks(words, variables, one_host=plan.is_here)


def _tell_plan(plan: LaunchPlan, words: Sequence[str]) -> None:
    click.echo(f"horovodrun: ranks by host: {plan.topology}", err=True)
    _tell_start(plan.variables, words)


def _tell_start(variables: Mapping[str, str], words: Sequence[str]) -> None:
    for name, value in variables.items():
        if value != os.environ.get(name):
            click.echo(f"horovodrun: {name}={value}", err=True)
    click.echo(f"horovodrun: {shlex.join(words)}", err=True)

"""`farandole emulate`: run a command on every host of an emulated cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from farandole.cli.options import PASS_ON
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.emulate.cluster import Cluster

_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0


@click.command(context_settings=PASS_ON)
@click.option("--hosts", type=int, default=2, show_default=True, help="How many hosts, up to 16.")
@click.option(
    "--rate", default="1gbit", show_default=True, help="Of each host's link, in either direction."
)
@click.option("--delay", help="From any host to any other, such as 1ms; the kernel needs netem.")
@click.option("--network", help="The hosts' addresses. [198.18.0.0/24]")
@click.option("--clean", is_flag=True, help="Only remove what killed emulators have left.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def emulate(
    hosts: int,
    rate: str,
    delay: str | None,
    network: str | None,
    clean: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on every host of an emulated cluster: network namespaces of this machine, joined
    by links with a bandwidth cap. Needs root.

    {host}, {hosts} and {master} in COMMAND stand for the host's number, how many there are, and the
    address of host 0. The exit code is that of the first host to fail; the others are stopped then.

    \b
      farandole emulate --hosts 2 --rate 1gbit -- \\
        torchrun --nnodes {hosts} --node-rank {host} --nproc-per-node 2 \\
                 --master-addr {master} --master-port 29500 train.py
    """
    from farandole.emulate.cluster import NETWORK, Cluster

    if clean:
        _clean(command)
        return
    if not command:
        raise UserError("what shall the hosts run? Give a command after --, such as -- hostname.")
    cluster = Cluster(hosts, rate, delay, network or NETWORK)
    commands = [fill_in(command, host, cluster) for host in range(hosts)]
    for program in {words[0] for words in commands}:
        if shutil.which(program) is None:
            raise UserError(f"there is no command {program!r} to run on the hosts.")
    sys.exit(_run(cluster, commands))


def fill_in(command: Sequence[str], host: int, cluster: Cluster) -> list[str]:
    """`command` as it is on one host. A shell's `${host}` is left to the shell."""
    values = {
        "host": str(host),
        "hosts": str(len(cluster.names)),
        "master": cluster.addresses[0],
    }
    place = re.compile(r"(?<!\$)\{(host|hosts|master)\}")
    return [place.sub(lambda found: values[found[1]], word) for word in command]


def _clean(command: Sequence[str]) -> None:
    from farandole.emulate.namespaces import remove_leftovers, require_root
    from farandole.launch.old_logs import remove_old_folders

    if command:
        raise UserError(f"--clean runs nothing, so leave {command[0]!r} out, or --clean.")
    require_root()
    removed = [*remove_leftovers(), *map(str, remove_old_folders())]
    for name in removed:
        click.echo(f"removed {name}")
    if not removed:
        click.echo("nothing is left of emulators that no longer run")


def _run(cluster: Cluster, commands: Sequence[Sequence[str]]) -> int:
    """Runs them all to their end and returns the exit code. The cluster is gone afterwards."""
    from farandole.launch.old_logs import remove_old_folders
    from farandole.launch.output import Relay, Source
    from farandole.system.owned_folders import OwnedFolder
    from farandole.worker.signals import exit_code_of, signals_noted

    remove_old_folders()
    with ExitStack() as stack:
        received = stack.enter_context(signals_noted())
        kept = OwnedFolder("hosts")
        stack.callback(kept.close)
        outputs = [kept.path / f"{name}.out" for name in cluster.names]
        errors = [kept.path / f"{name}.err" for name in cluster.names]
        shown = ((outputs, sys.stdout.buffer), (errors, sys.stderr.buffer))
        relay = Relay(
            [
                Source(path, f"[{name}] ", target)
                for paths, target in shown
                for path, name in zip(paths, cluster.names, strict=True)
            ]
        )
        relay.start()
        stack.callback(relay.stop)  # after the cluster, so that every process has written its last
        stack.enter_context(cluster)
        # A line shows when it is printed, not when a buffer fills.
        env = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
        processes = []
        for host, command in enumerate(commands):
            with outputs[host].open("wb") as out, errors[host].open("wb") as err:
                processes.append(cluster.start(host, command, env=env, stdout=out, stderr=err))
        failed = _wait(processes, received)
        _stop(processes)
    if received:
        click.echo(f"farandole: stopped by {received[0]}; no host is left", err=True)
        return exit_code_of(received[0])
    if failed is None:
        return 0
    code = processes[failed].returncode
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    click.secho(
        f"farandole: host {cluster.names[failed]} failed ({how}) and all hosts were stopped",
        fg="red",
        err=True,
    )
    return code if code > 0 else 128 - code


def _wait(processes: Sequence[subprocess.Popen[str]], received: Sequence[str]) -> int | None:
    """Until all have ended, or one has failed, whose number is returned, or a signal came."""
    while not received:
        codes = [process.poll() for process in processes]
        for host, code in enumerate(codes):
            if code:
                return host
        if None not in codes:
            return None
        time.sleep(_POLL_SECONDS)
    return None


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Asks those that still run to end, with their children; leaving the cluster does the rest."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)

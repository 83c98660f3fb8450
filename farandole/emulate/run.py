"""Runs a command on every host of an emulated cluster, and shows what each prints."""

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
from pathlib import Path

import click

from farandole.emulate.cluster import Cluster
from farandole.emulate.namespaces import remove_leftovers, require_root
from farandole.errors import UserError
from farandole.launch.old_logs import remove_old_folders
from farandole.launch.output import Relay, Source
from farandole.system.owned_folders import OwnedFolder
from farandole.worker.signals import exit_code_of, signals_noted

_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0


def fill_in(command: Sequence[str], host: int, cluster: Cluster) -> list[str]:
    """`command` as it is on one host. A shell's `${host}` is left to the shell."""
    values = {
        "host": str(host),
        "hosts": str(len(cluster.names)),
        "master": cluster.addresses[0],
    }
    place = re.compile(r"(?<!\$)\{(host|hosts|master)\}")
    return [place.sub(lambda found: values[found[1]], word) for word in command]


def clean_up() -> None:
    """Removes what killed emulators have left."""
    require_root()
    removed = [*remove_leftovers(), *map(str, remove_old_folders())]
    for name in removed:
        click.echo(f"removed {name}")
    if not removed:
        click.echo("nothing is left of emulators that no longer run")


def run_on_hosts(cluster: Cluster, command: Sequence[str]) -> int:
    """Runs the command on every host to its end, and returns the exit code. The cluster is gone
    afterwards. Raises `UserError` if there is no such command."""
    commands = [fill_in(command, host, cluster) for host in range(len(cluster.names))]
    for program in {words[0] for words in commands}:
        if shutil.which(program) is None:
            raise UserError(f"there is no command {program!r} to run on the hosts.")
    remove_old_folders()
    with ExitStack() as stack:
        received = stack.enter_context(signals_noted())
        kept = OwnedFolder("hosts")
        stack.callback(kept.close)
        outputs = [kept.path / f"{name}.out" for name in cluster.names]
        errors = [kept.path / f"{name}.err" for name in cluster.names]
        relay = _relay(cluster.names, outputs, errors)
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
    return 0 if failed is None else _explain(cluster.names[failed], processes[failed].returncode)


def _relay(names: Sequence[str], outputs: Sequence[Path], errors: Sequence[Path]) -> Relay:
    """Shows the lines of every host, with its name before each."""
    shown = ((outputs, sys.stdout.buffer), (errors, sys.stderr.buffer))
    return Relay(
        [
            Source(path, f"[{name}] ", target)
            for paths, target in shown
            for path, name in zip(paths, names, strict=True)
        ]
    )


def _explain(name: str, code: int) -> int:
    """Says how a host failed; returns the exit code for all of them."""
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    click.secho(
        f"farandole: host {name} failed ({how}) and all hosts were stopped",
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

"""Asks a script of the user which hosts there are: one a line, `host:slots` or `host`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from farandole.errors import LaunchError, UserError
from farandole.launch.hosts import parse_host_line

_TIMEOUT_SECONDS = 60.0


def discover_by_script(
    script: Path, slots: int = 1, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Callable[[], Mapping[str, int]]:
    """What to call to learn the hosts of this moment, with the slots of each.

    `slots` is for hosts that the script names without a number. Raises `UserError` when it cannot
    be run at all. A call raises `LaunchError` when the script fails, takes too long or prints
    something else.
    """
    path = script.resolve()
    if not path.is_file():
        raise UserError(f"there is no host discovery script {script}.")
    if not os.access(path, os.X_OK):
        raise UserError(f"the host discovery script {script} is not executable: chmod +x {script}")
    if slots < 1:
        raise UserError(f"--slots-per-host {slots}: a host has at least 1 slot.")

    def discover() -> dict[str, int]:
        return _read(_run(path, timeout_seconds), path, slots)

    return discover


def _run(script: Path, timeout_seconds: float) -> str:
    try:
        done = subprocess.run(
            [str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            start_new_session=True,  # Ctrl-C is the launcher's to deal with
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the host discovery script {script} did not end within {timeout_seconds:g} s."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"the host discovery script {script} cannot be run: {error}. Does its first line name "
            "an interpreter, such as #!/bin/sh?"
        ) from error
    if done.returncode != 0:
        raise LaunchError(
            f"the host discovery script {script} ended with exit code {done.returncode}: "
            f"{done.stderr.strip() or 'it did not say why'}"
        )
    return done.stdout


def _read(text: str, script: Path, slots: int) -> dict[str, int]:
    """No hosts is an answer too: there may be some later."""
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            host, count = parse_host_line(line.strip(), slots, f"{script}, line {number}")
        except UserError as error:
            raise LaunchError(str(error)) from None
        hosts[host] = hosts.get(host, 0) + count  # two names of one host count as two
    return hosts

"""Whether another host can take part in a job: compared before its first worker starts."""

from __future__ import annotations

import platform
from pathlib import Path

from farandole.errors import LaunchError
from farandole.launch.host_facts import HostFacts

_CLOCK_NAMED_SECONDS = 60.0
_CLOCK_REFUSED_SECONDS = 1800.0


def check_facts(
    host: str, here: HostFacts, there: HostFacts, script: Path | None, within_seconds: float = 0.0
) -> list[str]:
    """Returns what the user should know. Raises `LaunchError` where the job would fail or be wrong.

    `within_seconds` is how long the other host's answer took: so well its clock is known.
    """
    _check_versions(host, here, there)
    _check_script(host, here, there, script)
    return _check_clock(host, there.clock_seconds - here.clock_seconds, within_seconds) + (
        _name_builds(host, here, there)
    )


def _check_versions(host: str, here: HostFacts, there: HostFacts) -> None:
    python = _minor(there.python), _minor(here.python)
    torch = _public(there.torch), _public(here.torch)
    versions = {
        "Python": (*python, "Install the same one there, at the same path."),
        "torch": (*torch, f"Install the same one there: pip install torch=={torch[1]}"),
        "Farandole": (there.farandole, here.farandole, "Install the same one on both."),
    }
    for name, (other, own, advice) in versions.items():
        if other != own:
            raise LaunchError(
                f"host {host} has {name} {other or 'not installed'}, and {platform.node()} has "
                f"{own or 'none'}. {advice}"
            )


def _check_script(host: str, here: HostFacts, there: HostFacts, script: Path | None) -> None:
    if here.script_digest is None or there.script_digest == here.script_digest:
        return
    wrong = "is not on" if there.script_digest is None else "is another file on"
    raise LaunchError(
        f"the script {script} {wrong} host {host}. Copy it there, to the same path, or keep it in "
        "a folder that the hosts share."
    )


def _check_clock(host: str, ahead_seconds: float, within_seconds: float) -> list[str]:
    off = max(0.0, abs(ahead_seconds) - within_seconds)
    way = "ahead of" if ahead_seconds > 0 else "behind"
    told = f"the clock of host {host} is {abs(ahead_seconds):.0f} s {way} that of {platform.node()}"
    advice = "Set it, best by a time service: timedatectl set-ntp true"
    if off > _CLOCK_REFUSED_SECONDS:
        raise LaunchError(f"{told}. {advice}")
    return [f"{told}: times in logs and traces will not agree. {advice}"] * (
        off > _CLOCK_NAMED_SECONDS
    )


def _name_builds(host: str, here: HostFacts, there: HostFacts) -> list[str]:
    """Builds of the same version, such as +cpu and +cu128, understand each other."""
    if here.torch == there.torch:
        return []
    return [f"host {host} has torch {there.torch}, another build than {here.torch} here"]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _public(version: str | None) -> str | None:
    return None if version is None else version.partition("+")[0]

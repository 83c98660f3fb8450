"""The addresses of Slurm's nodes, whose names may be in no name service."""

from __future__ import annotations

import re
import subprocess

from farandole.errors import LaunchError
from farandole.launch.backends.slurm.programs import require

_SCONTROL_SECONDS = 60


def node_address(node: str) -> str:
    """As Slurm has it; else its name. Raises `UserError` without Slurm's programs, `LaunchError`
    where Slurm does not answer."""
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "--oneliner", node))
    return found[1] if found else node


def _scontrol(*words: str) -> str:
    """What it prints. Raises `LaunchError`."""
    program = require("scontrol")
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=_SCONTROL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`scontrol {' '.join(words)}` has not answered within {_SCONTROL_SECONDS} s. Is "
            "slurmctld running? Try `scontrol ping`."
        ) from None
    if done.returncode != 0:
        raise LaunchError(f"`scontrol {' '.join(words)}`: {done.stderr.strip() or done.stdout}")
    return done.stdout

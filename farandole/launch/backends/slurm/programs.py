"""Slurm's programs, which must be on this host."""

from __future__ import annotations

import shutil

from farandole.errors import UserError


def require(program: str) -> str:
    """The path of one of Slurm's programs. Raises `UserError` naming what to install."""
    found = shutil.which(program)
    if found is None:
        raise UserError(
            f"Slurm's {program} is needed, and there is none on the PATH: apt install slurm-client "
            "(Debian), or run it on a login node of the cluster. --dry-run only prints the script."
        )
    return found

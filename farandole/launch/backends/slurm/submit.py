"""Submits a job: writes its batch script, and hands that to sbatch."""

from __future__ import annotations

import secrets
import subprocess
import time
from pathlib import Path

import click

from farandole.errors import LaunchError, UserError
from farandole.files import write_whole
from farandole.launch.backends.slurm.batch_script import batch_script
from farandole.launch.backends.slurm.options import SlurmOptions
from farandole.launch.backends.slurm.programs import require
from farandole.launch.engines.request import EngineRequest
from farandole.launch.messages import tell

_SBATCH_SECONDS = 120


def submit(request: EngineRequest, options: SlurmOptions) -> int:
    """Prints the number of the job, and says where its output goes.

    Raises `UserError` where there is no sbatch, and `LaunchError` where it refuses the job.
    """
    request.check(request.workers)  # refuses now what the job could not do later
    name = request.name or _new_name(request.script)
    _check_name(name)
    folder = request.runs / name
    log = folder / "slurm-%j.out"
    text = batch_script(request, options, name, log)
    if options.dry_run:
        click.echo(text, nl=False)
        return 0
    sbatch = require("sbatch")
    folder.mkdir(parents=True, exist_ok=True)  # Slurm does not make it for its output
    script = options.output or folder / "job.sbatch"
    write_whole(script, text.encode(), private=True)
    number = _run(sbatch, script)
    click.echo(number)
    tell(f"submitted job {number} ({name}); output: {str(log).replace('%j', number)}")
    return 0


def _run(sbatch: str, script: Path) -> str:
    """The number of the job."""
    try:
        done = subprocess.run(
            [sbatch, "--parsable", str(script)],
            capture_output=True,
            text=True,
            timeout=_SBATCH_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"sbatch has not answered within {_SBATCH_SECONDS} s. Is slurmctld running? Try "
            "`scontrol ping`, and look with `squeue` whether the job is there."
        ) from None
    if done.returncode != 0:
        raise LaunchError(f"sbatch refuses {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # on several clusters, NUMBER;CLUSTER


def _new_name(script: str) -> str:
    # Two jobs may be submitted in the same second, and each must have a folder of its own.
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{Path(script).stem or 'run'}-{stamp}-{secrets.token_hex(2)}"


def _check_name(name: str) -> None:
    if not name.isprintable() or "%" in name or "\\" in name or "/" in name:
        raise UserError(
            f"--name {name!r}: under --on slurm it names files that Slurm writes, and so may have "
            "neither % nor slashes."
        )

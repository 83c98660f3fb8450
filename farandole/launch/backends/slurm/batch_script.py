"""The batch script of a job: `farandole run` in its allocation, queued again when it was preempted.

    Slurm                     batch script                launcher           workers
    time is nearly over ─USR1─▶ trap ──────────────USR1──▶ passes it on ───▶ save, leave with 138
                              138: scontrol requeue ◀──────────────────────
    preemption, requeue ─TERM─▶ trap ──────────────TERM──▶ stops them ─────▶ save, leave with 143
                              Slurm itself queues the job again

The run has a fixed name, so the next start of the job resumes from what was saved. A job that
`scancel` ends gets SIGTERM as well, and must not come back: so the script leaves that to Slurm.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.launch.backends.slurm.options import SlurmOptions
from farandole.launch.engines.request import EngineRequest
from farandole.worker.signals import exit_code_of

WARNING_SECONDS = 120
"""How long before the time limit Slurm sends SIGUSR1."""

_SCRIPT = """\
#!/bin/bash
# Written by `farandole run --on slurm`.
{directives}

# Signals go to the launcher, which passes them on: the workers save and leave.
trap 'kill -USR1 "$launcher" 2>/dev/null' USR1
trap 'kill -TERM "$launcher" 2>/dev/null' TERM
{command} &
launcher=$!
# A signal ends `wait` too; only the last one has the exit code of the launcher.
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done
wait "$launcher"
code=$?
if [ "$code" -eq {saved} ]; then
  echo "farandole: saved before the time limit; job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def batch_script(request: EngineRequest, options: SlurmOptions, name: str, log: Path) -> str:
    """`log`: where the output of the job goes; Slurm replaces %j by the number of the job."""
    directives = [
        f"--job-name={name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.per_node}",
        f"--output={log}",
        "--open-mode=append",  # the job may start several times
        "--requeue",
        f"--signal=B:USR1@{WARNING_SECONDS}",
        *options.directives(),
    ]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {shlex.quote(each)}" for each in directives),
        command=shlex.join(_inner_command(request, name)),
        saved=exit_code_of("SIGUSR1"),
    )


def _inner_command(request: EngineRequest, name: str) -> Sequence[str]:
    """The same command again. In the allocation, it starts the workers."""
    run, *rest = request.words
    counts = (f"--nodes={request.nodes}", f"--per-node={request.per_node}", f"--name={name}")
    return (sys.executable, "-m", "farandole", run, "--on=slurm", *counts, *rest)

"""`horovodrun --min-np …`: a job whose hosts and workers may change."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.errors import UserError
from farandole.horovod.cli.variables import default_seconds
from farandole.horovod.settings import Settings
from farandole.launch.backends.ssh.channel import Ssh, answer_seconds
from farandole.launch.launcher import launch_elastic
from farandole.launch.outcome_text import print_outcome
from farandole.launch.policies.elastic.host_script import discover_by_script
from farandole.launch.policies.elastic.job import ElasticJob

_ANSWER_GRACE_SECONDS = 30.0


def start_elastic(
    flags: Mapping[str, Any],
    hosts: Mapping[str, int] | None,
    command: Sequence[str],
    variables: Mapping[str, str],
    ssh: Ssh,
    interfaces: Sequence[str],
) -> int:
    """Runs the job to its end; its exit code. `hosts` are those that stay, if no script says."""
    if flags["mpi"]:
        raise UserError("--mpi: the workers of mpirun cannot change. Leave --mpi out.")
    script = flags["host_discovery_script"]
    if script is None and hosts is None:
        raise UserError(
            "an elastic job needs hosts that can change: --host-discovery-script FILE, or -H."
        )
    fixed = dict(hosts or {})
    job = ElasticJob(
        command=command,
        min_workers=flags["min_np"] or flags["num_proc"],
        max_workers=flags["max_np"],
        discover=discover_by_script(script, flags["slots"] or 1) if script else lambda: fixed,
        workers=flags["num_proc"],
        environment=variables,
        reset_limit=flags["reset_limit"],
        start_timeout_seconds=flags["elastic_timeout"]
        or default_seconds("HOROVOD_ELASTIC_TIMEOUT", 600),
        answer_seconds=_collective_seconds(variables) + _ANSWER_GRACE_SECONDS,
        whole_command=True,
        channel=ssh,
        connect_seconds=answer_seconds(ssh),
        interfaces=interfaces,
    )
    outcome = launch_elastic(job)
    print_outcome(outcome, job.workers or job.min_workers, "worker")
    return outcome.exit_code


def _collective_seconds(variables: Mapping[str, str]) -> float:
    """After which a collective that waits for a stuck worker breaks."""
    return Settings.from_environ({**os.environ, **variables}).timeout.total_seconds()

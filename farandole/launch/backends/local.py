"""Starts a script on the workers of this host.

Most jobs stop together: see `together`. A tolerant one goes on without a worker that failed: see
`supervisor`.
"""

from __future__ import annotations

from farandole.launch.hosts import HERE
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.policies.stop_all import run_together
from farandole.launch.policies.tolerant import supervise
from farandole.topology import Topology

__all__ = ["Job", "Outcome", "launch"]


def launch(job: Job) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens."""
    if job.tolerant:
        return supervise(job)
    return run_together(job, Topology.single(job.workers, HERE), JobDirectory(job))

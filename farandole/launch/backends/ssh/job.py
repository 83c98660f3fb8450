"""Runs a job on several hosts: workers of this one directly, those of others by ssh.

    this host                                               other hosts
    ┌──────────────────────────────────┐   ssh     ┌────────────────────────────┐
    │ launcher                         │ ────────▶ │ attendant ──▶ worker       │ × n
    │ store, at an address that the    │ ◀──────── │                            │
    │ others reach       worker × m    │  store    └────────────────────────────┘
    └──────────────────────────────────┘

It ends as a job of one host does, and no process is left, here or there.
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.launch.backends.local import launch
from farandole.launch.backends.ssh.start import Ssh
from farandole.launch.hosts import HERE
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.policies.stop_all import run_together
from farandole.topology import Topology
from farandole.worker.network import address_for


def launch_on_hosts(
    job: Job, topology: Topology, ssh: Ssh, interfaces: Sequence[str] = ()
) -> Outcome:
    """Runs `job` on the hosts of `topology`; the one called `localhost` is this one.

    `interfaces` are those that the hosts share, if the system shall not choose. Raises `UserError`
    when other hosts cannot be reached from here, and `LaunchError` when a worker cannot be started.
    """
    others = [host.name for host in topology.hosts if host.name != HERE]
    if not others:
        return launch(job)
    address = address_for(others, interfaces)
    here = sum(len(host.ranks) for host in topology.hosts if host.name == HERE)
    return run_together(
        job,
        topology,
        JobDirectory(job, here=here),
        address=address,
        ssh=ssh,
        interfaces=interfaces,
    )

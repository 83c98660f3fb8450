"""The allocation that this process runs in: its nodes, and whether they are as many as asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.errors import UserError
from farandole.launch.engines.node_counts import place_evenly
from farandole.launch.engines.request import EngineRequest
from farandole.launch.hosts import HERE, place_workers
from farandole.launch.placement.schedulers import SLURM, find_allocation
from farandole.topology import Topology
from farandole.worker.network import is_here


@dataclass(frozen=True)
class SlurmAllocation:
    """A job's nodes with the number of tasks that were asked for on each, in Slurm's order."""

    job: str
    tasks: Mapping[str, int]
    own_node: str | None  # what Slurm calls this host

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> SlurmAllocation | None:
        """None outside of one. Raises `UserError` in a job step of several tasks."""
        job = environ.get("SLURM_JOB_ID")
        found = find_allocation(environ)
        if not job or found is None or found.scheduler != SLURM:
            return None
        tasks = {entry.name: entry.slots for entry in found.hosts}
        return cls(job, tasks, found.own_name)

    def topology(self, request: EngineRequest) -> Topology:
        """Raises `UserError` naming both numbers where it is smaller than asked."""
        slots = self._named()
        if not request.is_counted:
            return place_workers(slots, sum(slots.values()))
        nodes, per_node = request.nodes, request.per_node
        return place_evenly(
            slots,
            nodes,
            per_node,
            where=f"Slurm job {self.job}",
            more=f"allocate more: salloc --nodes={nodes} --ntasks-per-node={per_node}",
        )

    def _named(self) -> dict[str, int]:
        """With this host as `localhost`: Slurm may call it otherwise than it calls itself."""
        named = {
            HERE if node == self.own_node or is_here(node) else node: count
            for node, count in self.tasks.items()
        }
        if len(named) < len(self.tasks):
            raise UserError(
                f"several of the nodes {', '.join(self.tasks)} of Slurm job {self.job} are this "
                "host. Allocate one node."
            )
        return named

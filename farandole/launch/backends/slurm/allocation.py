"""The allocation that this process runs in: its nodes, and whether they are as many as asked."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.errors import LaunchError, UserError
from farandole.launch.backends.slurm.submit import require
from farandole.launch.engine_request import EngineRequest
from farandole.launch.hosts import HERE, place_workers
from farandole.topology import Topology
from farandole.worker.environment import tasks_per_node
from farandole.worker.network import address_for, is_here

_SCONTROL_SECONDS = 60


@dataclass(frozen=True)
class SlurmAllocation:
    """A job's nodes with the number of tasks that were asked for on each, in Slurm's order."""

    job: str
    tasks: Mapping[str, int]
    own_node: str | None  # what Slurm calls this host

    def topology(self, request: EngineRequest) -> Topology:
        """Raises `UserError` naming both numbers where it is smaller than asked."""
        if not request.is_counted:
            return self._placed(dict(self.tasks))
        if len(self.tasks) < request.nodes:
            raise UserError(
                f"--nodes {request.nodes}: Slurm job {self.job} has {len(self.tasks)} "
                f"({', '.join(self.tasks)}). Ask for --nodes {len(self.tasks)}, or allocate more: "
                f"salloc --nodes={request.nodes} --ntasks-per-node={request.per_node}"
            )
        chosen = dict(list(self.tasks.items())[: request.nodes])
        for node, tasks in chosen.items():
            if tasks < request.per_node:
                raise UserError(
                    f"--per-node {request.per_node}: Slurm job {self.job} has {tasks} tasks on "
                    f"node {node}. Ask for --per-node {min(chosen.values())}, or allocate more: "
                    f"salloc --nodes={request.nodes} --ntasks-per-node={request.per_node}"
                )
        return self._placed(dict.fromkeys(chosen, request.per_node))

    def _placed(self, slots: Mapping[str, int]) -> Topology:
        # Slurm may call this host otherwise than it calls itself.
        named = {
            HERE if node == self.own_node or is_here(node) else node: count
            for node, count in slots.items()
        }
        if len(named) < len(slots):
            raise UserError(
                f"several of the nodes {', '.join(slots)} of Slurm job {self.job} are this host. "
                "Ask for --nodes 1."
            )
        return place_workers(named, sum(named.values()))


def find_allocation(environ: Mapping[str, str] = os.environ) -> SlurmAllocation | None:
    """None outside of one. Raises `UserError` in a job step of several tasks."""
    job = environ.get("SLURM_JOB_ID")
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks != "1":
        raise UserError(
            f"srun has started {tasks} tasks of this command, and one is enough: it starts the "
            "workers itself. Leave srun out, or start the script: srun python train.py"
        )
    names = _expand(nodes)
    counts = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")) or [1] * len(names)
    if len(counts) != len(names):
        raise UserError(
            f"Slurm says SLURM_JOB_NODELIST={nodes} ({len(names)} nodes) and SLURM_TASKS_PER_NODE="
            f"{environ['SLURM_TASKS_PER_NODE']} ({len(counts)} nodes), which do not go together."
        )
    own = environ.get("SLURMD_NODENAME")
    return SlurmAllocation(job, dict(zip(names, counts, strict=True)), own)


def own_address(topology: Topology) -> str | None:
    """The address of this host that leads to the other nodes; None where there are none.

    Slurm knows their addresses, also where their names are in no name service.
    """
    others = [host.name for host in topology.hosts if host.name != HERE]
    if not others:
        return None
    said = _scontrol("show", "node", "--oneliner", others[0])
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return address_for([found[1] if found else others[0]])


def _expand(nodes: str) -> list[str]:
    """`node[03-05]` is node03, node04 and node05."""
    return _scontrol("show", "hostnames", nodes).split()


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

"""Other nodes of a Slurm allocation, by srun: Slurm knows them, and ends what is left of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from farandole.launch.backends.slurm.node_address import node_address


@dataclass(frozen=True)
class Srun:
    """A `Channel` to the nodes of the allocation that this process runs in."""

    name: ClassVar[str] = "srun"

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """A job step of one task, which has all that the job has on the node."""
        return [
            *("srun", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
            "--overlap",  # beside other steps, and beside the batch script itself
            "--cpu-bind=none",  # the workers of the node are several, and the task is one
            *("--input=0", "--unbuffered"),  # byte for byte, in both directions
            *("--mpi=none", "--export=ALL", "--quiet"),
            *command,
        ]

    def advice(self, host: str) -> str:
        return (
            f"Try `srun --overlap -N1 -n1 -w {host} true` in the allocation, and look at `scontrol "
            f"show node {host}`."
        )

    def address_of(self, host: str) -> str:
        return node_address(host)

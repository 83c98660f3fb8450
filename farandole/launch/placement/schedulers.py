"""The hosts that a scheduler has given to the job, from its environment: Slurm, PBS, LSF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import UserError
from farandole.launch.hosts import check_host_name
from farandole.launch.placement.host_file import HostEntry
from farandole.worker.slurm_nodes import expand_nodes, tasks_per_node

SLURM = "Slurm"


@dataclass(frozen=True)
class Allocation:
    """What a scheduler has given, and how to ask it for more."""

    scheduler: str
    hosts: tuple[HostEntry, ...]
    ask_for_more: str
    own_name: str | None = None  # what the scheduler calls this host, if it says so


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """None outside of a scheduler's job. Raises `UserError` for one that cannot be read."""
    readers: Sequence[Callable[[Mapping[str, str]], Allocation | None]] = (_slurm, _pbs, _lsf)
    for read in readers:
        found = read(environ)
        if found is not None:
            return found
    return None


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks != "1":
        raise UserError(
            f"srun has started {tasks} of this command, and each would start a job on all nodes. "
            "Start it once, in the batch script itself; or give each one a job of its own: "
            "-H localhost:1"
        )
    names = expand_nodes(nodes)
    said = environ.get("SLURM_TASKS_PER_NODE", "")
    counts = tasks_per_node(said)
    if len(counts) != len(names):
        raise UserError(
            f"Slurm says SLURM_JOB_NODELIST={nodes} ({len(names)} nodes) and "
            f"SLURM_TASKS_PER_NODE={said} ({len(counts)} nodes), which do not go together. Name "
            "the hosts yourself: -H node1:4,node2:4"
        )
    slots = dict(zip(names, counts, strict=True))
    entries = _entries(slots, "SLURM_JOB_NODELIST")
    return Allocation(SLURM, entries, "sbatch --ntasks", environ.get("SLURMD_NODENAME"))


def _pbs(environ: Mapping[str, str]) -> Allocation | None:
    path = environ.get("PBS_NODEFILE")
    if not path:
        return None
    slots = _count_lines(path, "PBS_NODEFILE")
    return Allocation("PBS", _entries(slots, path), "qsub -l select=…:mpiprocs=…")


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    ask = "bsub -n"
    said = environ.get("LSB_MCPU_HOSTS")
    if said:
        words = said.split()
        names, counts = words[::2], words[1::2]
        if len(names) != len(counts) or not all(count.isdecimal() for count in counts):
            raise UserError(
                f"LSB_MCPU_HOSTS={said!r} is not what LSF writes, such as 'node1 4 node2 4'. Name "
                "the hosts yourself: -H node1:4,node2:4"
            )
        slots: Counter[str] = Counter()
        for name, count in zip(names, counts, strict=True):
            slots[name] += int(count)
        return Allocation("LSF", _entries(slots, "LSB_MCPU_HOSTS"), ask)
    path = environ.get("LSB_DJOB_HOSTFILE")
    if not path:
        return None
    slots = _count_lines(path, "LSB_DJOB_HOSTFILE")
    return Allocation("LSF", _entries(slots, path), ask)


def _count_lines(path: str, variable: str) -> Counter[str]:
    """These files have a line for each slot, with the name of its host."""
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{variable}={path} cannot be read: {error}. Name the hosts yourself: "
            "-H node1:4,node2:4"
        ) from error
    return Counter(lines)


def _entries(slots: Mapping[str, int], where: str) -> tuple[HostEntry, ...]:
    """In their order. A host without slots gets no workers."""
    found = tuple(
        HostEntry(check_host_name(name, where), count) for name, count in slots.items() if count
    )
    if not found:
        raise UserError(f"{where} names no host. Name the hosts yourself: -H node1:4,node2:4")
    return found

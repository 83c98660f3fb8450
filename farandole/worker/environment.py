"""Which rank does this process have? Read from the variables that its launcher set.

Four families of launcher are known. They are asked from the most to the least specific, because
they nest: `farandole run` inside a Slurm step sees both sets of variables, and its own must win.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from farandole.environment import JOB
from farandole.errors import JoinError
from farandole.worker.slurm_nodes import expand_nodes, tasks_per_node
from farandole.worker.store.address import StoreAddress, launcher_store

_RANK_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|(OMPI|MV2)_COMM_WORLD_\w+|PMI_(LOCAL_)?(RANK|SIZE)|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NTASKS|STEP_NUM_TASKS))"
)


@dataclass(frozen=True)
class RankAssignment:
    """One process's place in its job, before anyone has talked to anyone."""

    launcher: str  # "farandole", "torchrun", "openmpi", "mpich", "mvapich", "slurm" or "alone"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None  # where rank 0, or the agent, can be reached
    port: int | None = None
    agent_store: bool = False  # the launcher already runs the store; nobody else should
    store: StoreAddress | None = None  # where it is, if it is ours
    job: str = ""  # the same on every rank, different for every job
    attempt: int = 0

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size


def detect(environ: Mapping[str, str], parent_pid: int | None = None) -> RankAssignment:
    """The rank that `environ` describes; rank 0 of 1 when no launcher is recognised.

    Raises `JoinError` when a launcher is recognised but its variables contradict one another.
    """
    parent = os.getppid() if parent_pid is None else parent_pid
    for reader in (_elastic, _open_mpi, _mvapich, _pmi, _slurm):
        assignment = reader(environ, parent)
        if assignment is not None:
            return _checked(assignment)
    return RankAssignment("alone")


def hide_rank_variables(environ: MutableMapping[str, str]) -> None:
    """Removes what tells a process which rank it is, whichever launcher has said so."""
    for name in [name for name in environ if _RANK_VARIABLES.fullmatch(name)]:
        del environ[name]


def _checked(assignment: RankAssignment) -> RankAssignment:
    if not (
        0 <= assignment.rank < assignment.size
        and 0 <= assignment.local_rank < assignment.local_size <= assignment.size
    ):
        raise JoinError(
            f"{assignment.launcher} says rank {assignment.rank} of {assignment.size}, local rank "
            f"{assignment.local_rank} "
            f"of {assignment.local_size}: that cannot be. Check the variables it sets."
        )
    return assignment


def _elastic(env: Mapping[str, str], parent: int) -> RankAssignment | None:
    """`farandole run` and torchrun: both run TorchElastic's agent. Also a hand-set RANK."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size = _int(env, "WORLD_SIZE")
    assignment = RankAssignment(
        launcher="farandole" if JOB in env else "torchrun",
        rank=_int(env, "RANK"),
        size=size,
        local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK")),
        local_size=_int(env, "LOCAL_WORLD_SIZE", size),
        address=env.get("MASTER_ADDR"),
        port=_port(env),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        store=_own_store(env),
        job=env.get(JOB) or env.get("TORCHELASTIC_RUN_ID", "torchrun"),
        attempt=_int(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    return (
        assignment if "LOCAL_WORLD_SIZE" in env or size == 1 else _hand_set(assignment, env, parent)
    )


def _own_store(env: Mapping[str, str]) -> StoreAddress | None:
    """That of our launcher, unless somebody below it, such as torchrun, has set another place."""
    store = launcher_store(env) if JOB in env else None
    return store if store is not None and store.port == _port(env) else None


def _hand_set(assignment: RankAssignment, env: Mapping[str, str], parent: int) -> RankAssignment:
    """RANK and WORLD_SIZE, but not who shares a host, as many recipes for srun and mpirun have it.

    The launcher below knows. Without one, a MASTER_ADDR on loopback says that it is one host.
    """
    for reader in (_open_mpi, _mvapich, _pmi, _slurm):
        below = reader(env, parent)
        if below is not None and (below.rank, below.size) == (assignment.rank, assignment.size):
            return replace(assignment, local_rank=below.local_rank, local_size=below.local_size)
    if assignment.address is None or is_loopback(assignment.address):
        return assignment
    raise JoinError(
        f"RANK={assignment.rank}, WORLD_SIZE={assignment.size} and "
        f"MASTER_ADDR={assignment.address} are set, but not "
        "which ranks share a host. Set LOCAL_RANK and LOCAL_WORLD_SIZE too."
    )


def _open_mpi(env: Mapping[str, str], parent: int) -> RankAssignment | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(parent)
    return _mpi_assignment(env, "openmpi", "OMPI_COMM_WORLD_{}", job)


def _mvapich(env: Mapping[str, str], parent: int) -> RankAssignment | None:
    if "MV2_COMM_WORLD_RANK" not in env:
        return None
    return _mpi_assignment(env, "mvapich", "MV2_COMM_WORLD_{}", str(parent))


def _mpi_assignment(
    env: Mapping[str, str], launcher: str, pattern: str, job: str
) -> RankAssignment:
    size = _int(env, pattern.format("SIZE"))
    rank = _int(env, pattern.format("RANK"))
    return RankAssignment(
        launcher,
        rank=rank,
        size=size,
        local_rank=_int(env, pattern.format("LOCAL_RANK"), rank),
        local_size=_int(env, pattern.format("LOCAL_SIZE"), size),
        address=env.get("MASTER_ADDR"),
        port=_port(env),
        job=job,
    )


def _pmi(env: Mapping[str, str], parent: int) -> RankAssignment | None:
    """MPICH, Intel MPI, Cray MPICH and MVAPICH on Hydra: all speak PMI.

    Hydra (and mpirun_rsh) gives its ranks no job id, but all ranks of a host are children of one
    proxy process, so the parent's id serves on one host.
    """
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    if "SLURM_STEP_ID" in env and not {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"} & env.keys():
        return None  # `srun --mpi=pmi2`: Slurm's own variables also say who shares a host
    size, rank = _int(env, "PMI_SIZE"), _int(env, "PMI_RANK")
    return RankAssignment(
        "mpich",
        rank=rank,
        size=size,
        local_rank=_int(env, "MPI_LOCALRANKID", _int(env, "PMI_LOCAL_RANK", rank)),
        local_size=_int(env, "MPI_LOCALNRANKS", _int(env, "PMI_LOCAL_SIZE", size)),
        address=env.get("MASTER_ADDR"),
        port=_port(env),
        job=env.get("PMI_JOBID") or str(parent),
    )


def _slurm(env: Mapping[str, str], parent: int) -> RankAssignment | None:
    """A task of `srun`. A batch script itself has SLURM_PROCID too, but no step: it is alone."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    size = _int(env, "SLURM_STEP_NUM_TASKS", _int(env, "SLURM_NTASKS", 1))
    job = f"slurm-{env.get('SLURM_JOB_ID', '')}-{env['SLURM_STEP_ID']}"
    nodes = expand_nodes(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", str(size))
    counts = tasks_per_node(per_node)
    node = _int(env, "SLURM_NODEID", 0)
    return RankAssignment(
        "slurm",
        rank=_int(env, "SLURM_PROCID"),
        size=size,
        local_rank=_int(env, "SLURM_LOCALID", 0),
        local_size=counts[node] if node < len(counts) else size,
        address=env.get("MASTER_ADDR") or (nodes[0] if nodes else None),
        # Same on every rank, and unlikely to meet another step's.
        port=_port(env) or 20_000 + (_digits(job) % 20_000),
        job=job,
    )


def is_loopback(address: str) -> bool:
    """Whether a name or an address is this machine's own by definition."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _digits(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or 0)


def _port(env: Mapping[str, str]) -> int | None:
    return _int(env, "MASTER_PORT") if env.get("MASTER_PORT") else None


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    raw = env.get(name)
    if raw is None and default is not None:
        return default
    try:
        return int(raw or "")
    except ValueError:
        raise JoinError(f"the launcher set {name}={raw!r}, which is not a number.") from None

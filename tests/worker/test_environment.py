"""Which rank a process has, from the variables that launchers set.

The sets of torchrun and Open MPI are what `env` printed under them, cut to the families that could
mislead; those of MPICH, MVAPICH2 and Slurm are put together from their documentation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.errors import JoinError
from farandole.worker.environment import (
    RankAssignment,
    detect,
    is_loopback,
)

PARENT = 4711

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "b3c0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI_4 = {
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_ess_base_jobid": "1191968769",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_ess_num_procs": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_ID": "1191968769.1",
    "PMIX_NAMESPACE": "1191968769",
    "PMIX_RANK": "1",
    "PMIX_VERSION": "4.2.2rc2",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "HYDI_CONTROL_FD": "7",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_ID": "2",
    "PMI_PORT": "node1:35017",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "134",
    "SLURM_JOB_NODELIST": "node[03-05]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SRUN_ONE_HOST = {
    "SLURM_JOB_ID": "134",
    "SLURM_JOB_NODELIST": "node03",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node03",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
PMI2 = {"PMI_FD": "14", "PMI_JOBID": "134.7", "PMI_RANK": "3", "PMI_SIZE": "5"}
INTERACTIVE_STEP = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node03",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def assignment_in(variables: dict[str, str]) -> RankAssignment:
    return detect(variables, parent_pid=PARENT)


def place(assignment: RankAssignment) -> tuple[int, int, int, int]:
    return assignment.rank, assignment.size, assignment.local_rank, assignment.local_size


def test_torchrun() -> None:
    assert assignment_in(TORCHRUN) == RankAssignment(
        "torchrun", 1, 2, 1, 2, "127.0.0.1", 29500, agent_store=True, job="b3c0", attempt=2
    )


def test_ours_is_torchrun_with_a_job_of_our_own() -> None:
    ours = assignment_in(TORCHRUN | {"FARANDOLE_JOB": "c0de"})
    assert ours == replace(assignment_in(TORCHRUN), launcher="farandole", job="c0de")
    assert ours.one_host


def test_torchrun_on_several_hosts() -> None:
    assignment = assignment_in(TORCHRUN | {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "node03"})
    assert place(assignment) == (3, 4, 1, 2)
    assert not assignment.one_host


def test_open_mpi() -> None:
    assignment = assignment_in(OPEN_MPI_4)
    assert assignment == RankAssignment("openmpi", 1, 2, 1, 2, job="1191968769")
    assert assignment.one_host
    older = {key: value for key, value in OPEN_MPI_4.items() if not key.startswith("PMIX")}
    assert assignment_in(older) == assignment


def test_mpich_on_hydra_takes_its_parent_for_the_job() -> None:
    assignment = assignment_in(HYDRA)
    assert assignment == RankAssignment("mpich", 3, 4, 1, 2, job=str(PARENT))
    assert not assignment.one_host


def test_the_parent_is_asked_for_when_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 99)
    assert detect(HYDRA).job == "99"


def test_mvapich() -> None:
    assert assignment_in(MVAPICH2) == RankAssignment("mvapich", 2, 4, 0, 2, job=str(PARENT))


def test_srun_on_several_hosts() -> None:
    assignment = assignment_in(SRUN)
    assert place(assignment) == (3, 5, 1, 2)
    assert (assignment.launcher, assignment.job, assignment.address) == (
        "slurm",
        "slurm-134-7",
        "node03",
    )
    assert not assignment.one_host
    last = assignment_in(SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert place(last) == (4, 5, 0, 1)
    assert (last.address, last.port) == (assignment.address, assignment.port)


def test_srun_on_one_host() -> None:
    assignment = assignment_in(SRUN_ONE_HOST)
    assert place(assignment) == (1, 2, 1, 2)
    assert assignment.one_host


def test_two_steps_of_one_job_do_not_meet() -> None:
    one, other = assignment_in(SRUN), assignment_in(SRUN | {"SLURM_STEP_ID": "8"})
    assert one.job != other.job
    assert one.port != other.port
    assert 1024 < (one.port or 0) < 65536


def test_a_chosen_master_wins_over_slurms_first_host() -> None:
    assignment = assignment_in(SRUN | {"MASTER_ADDR": "node04", "MASTER_PORT": "1234"})
    assert (assignment.address, assignment.port) == ("node04", 1234)


@pytest.mark.parametrize("variables", [{}, BATCH_SCRIPT, {"SLURM_JOB_ID": "134"}, {"RANK": "1"}])
def test_alone(variables: dict[str, str]) -> None:
    assert assignment_in(variables) == RankAssignment("alone")


def test_the_shell_of_an_interactive_allocation_is_one_task() -> None:
    assert place(assignment_in(INTERACTIVE_STEP)) == (0, 1, 0, 1)


@pytest.mark.parametrize("outside", [SRUN, SRUN_ONE_HOST, OPEN_MPI_4, HYDRA, MVAPICH2])
def test_ours_inside_another_launcher_wins(outside: dict[str, str]) -> None:
    ours = TORCHRUN | {"FARANDOLE_JOB": "c0de"}
    assert assignment_in(outside | ours) == assignment_in(ours)


@pytest.mark.parametrize("inside", [OPEN_MPI_4, MVAPICH2, HYDRA])
def test_mpirun_inside_a_slurm_step_wins(inside: dict[str, str]) -> None:
    # mpirun starts its own daemons with srun, one task a host, and the ranks inherit the step.
    daemon = SRUN | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    assert assignment_in(daemon | inside) == assignment_in(inside)


def test_srun_with_pmi2_still_knows_who_shares_a_host() -> None:
    # Slurm's PMI2 gives rank and size, but not the local ones; its own variables do.
    assert assignment_in(SRUN | PMI2) == assignment_in(SRUN)


def test_a_hand_set_rank_on_one_host() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assignment = assignment_in(variables)
    assert place(assignment) == (1, 2, 1, 2)
    assert not assignment.agent_store


def test_a_hand_set_rank_under_srun_borrows_the_local_rank() -> None:
    recipe = {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "node03", "MASTER_PORT": "29500"}
    assignment = assignment_in(SRUN | recipe)
    assert place(assignment) == (3, 5, 1, 2)
    assert (assignment.address, assignment.port) == ("node03", 29500)


def test_a_hand_set_rank_with_another_host_must_say_who_shares_one() -> None:
    with pytest.raises(JoinError, match=r"MASTER_ADDR=node03.*LOCAL_WORLD_SIZE"):
        assignment_in(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node03", "MASTER_PORT": "29500"}
        )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "2"}, "rank 2 of 2"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 2"),
        (TORCHRUN | {"LOCAL_RANK": "5"}, "local rank 5 of 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "of 3"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1"}, "rank 1 of 1"),
        (HYDRA | {"MPI_LOCALRANKID": "2"}, "local rank 2 of 2"),
        (MVAPICH2 | {"MV2_COMM_WORLD_LOCAL_SIZE": "9"}, "of 9"),
        (SRUN | {"SLURM_PROCID": "5"}, "rank 5 of 5"),
        (SRUN | {"SLURM_LOCALID": "2"}, "local rank 2 of 2"),
    ],
)
def test_contradictions_are_refused_with_their_values(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(JoinError, match=message):
        assignment_in(variables)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["node03", "10.0.0.1", "128.0.0.1"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


def test_the_store_of_our_launcher_unless_another_is_nearer() -> None:
    ours = TORCHRUN | {"FARANDOLE_JOB": "j", "FARANDOLE_STORE": "unix:29500:/tmp/a/store.socket"}
    store = assignment_in(ours).store
    assert store is not None
    assert str(store) == "/tmp/a/store.socket"
    assert (
        assignment_in(ours | {"MASTER_PORT": "29501"}).store is None
    )  # torchrun inside of a worker
    assert assignment_in(TORCHRUN).store is None

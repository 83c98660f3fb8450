"""`--on slurm`: outside of an allocation it submits a batch job, inside it runs on the nodes."""

from __future__ import annotations

from dataclasses import replace

from farandole.errors import UserError
from farandole.launch.backends.slurm.allocation import SlurmAllocation
from farandole.launch.backends.slurm.channel import Srun
from farandole.launch.backends.slurm.options import SlurmOptions
from farandole.launch.backends.slurm.submit import submit
from farandole.launch.engines.request import EngineRequest
from farandole.launch.hosts import HERE
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.outcome_text import print_outcome
from farandole.launch.restarting import launch_with_restarts


def start(request: EngineRequest) -> int:
    """Raises `UserError` and `LaunchError`."""
    options = SlurmOptions(**request.settings)
    allocation = SlurmAllocation.find()
    if allocation is None:
        return submit(request, options)
    return _run(request, allocation)


def _run(request: EngineRequest, allocation: SlurmAllocation) -> int:
    for name in request.settings:
        option = "time" if name == "time_limit" else name.replace("_", "-")
        raise UserError(
            f"--{option} is for submitting a job, and this is inside of Slurm job "
            f"{allocation.job}, on whose nodes the workers are started. Leave it out."
        )
    topology = allocation.topology(request)
    job = request.job(topology)
    if topology.host(0).name != HERE:  # under salloc this may be a login node
        job = replace(job, rank0_owns_terminal=False)

    def launch(job: Job) -> Outcome:
        return launch_on_hosts(job, topology, Srun(), request.interfaces)

    outcome = launch_with_restarts(lambda job, _: launch(job), job, topology, request.restarts)
    print_outcome(outcome, topology.size, topology=topology)
    return outcome.exit_code

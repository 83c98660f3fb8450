"""`--on mpi`: one mpirun starts all ranks, so that `--transport mpi` can carry the bytes."""

from __future__ import annotations

import shlex
import sys

import click

from farandole.environment import SYNC, TRANSPORT
from farandole.launch.backends.mpi import mpirun
from farandole.launch.backends.mpi.command import meeting_place, mpi_words
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.engines.node_counts import place_evenly
from farandole.launch.engines.request import EngineRequest

_ANOTHER = (
    "Start it yourself, with the options as variables (see docs/commands.md): "
    f"{SYNC}=… mpirun -n 4 python train.py"
)


def start(request: EngineRequest) -> int:
    """Raises `UserError` where there is no Open MPI, or where hosts have too few slots."""
    placement = request.placement()
    topology = placement.topology
    if request.is_counted:
        slots = {host.name: len(host.ranks) for host in topology.hosts}
        counts = request.nodes, request.per_node
        topology = place_evenly(slots, *counts, where="the list of hosts", more="name more: -H")
    asked = request.variables(topology.size)
    found = mpirun.require("--on mpi", _ANOTHER)
    if asked.get(TRANSPORT) == "mpi":
        mpirun.require_mpi4py("--transport mpi")
    variables = {**asked, **meeting_place(topology, placement.interfaces)}
    words = mpi_words(
        found,
        topology,
        [sys.executable, *request.command],
        variables,
        ssh=placement.channel if isinstance(placement.channel, Ssh) else Ssh(),
        interfaces=placement.interfaces,
    )
    if request.settings.get("dry_run"):
        click.echo(shlex.join(words))
        return 0
    here = not placement.others
    return mpirun.run_ranks(words, variables, one_host=here)

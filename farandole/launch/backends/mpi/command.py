"""The command line of mpirun for a job on some hosts. Values of variables are never on it."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from farandole.environment import TOKEN
from farandole.launch.backends.remote.exported import exported
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.hosts import HERE
from farandole.topology import Topology
from farandole.worker.network import address_for
from farandole.worker.store.address import new_token

_PORTS = range(20_000, 32_000)  # below those that systems hand out by themselves


def mpi_words(
    mpirun: str,
    topology: Topology,
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    ssh: Ssh,
    interfaces: Sequence[str] = (),
    output: Path | None = None,
    timed: bool = False,
    mpi_args: str = "",
    binding_args: str = "",
) -> list[str]:
    """The command line of mpirun; it takes the values of `variables` from its own environment."""
    hosts = ",".join(f"{host.name}:{len(host.ranks)}" for host in topology.hosts)
    given = {"-p": ssh.port, "-i": ssh.identity_file}
    rsh = [str(word) for flag, value in given.items() if value for word in (flag, value)]
    networks = ",".join(interfaces)
    return [
        mpirun,
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "--tag-output",
        *(["--timestamp-output"] if timed else []),
        *("-np", str(topology.size), "-H", hosts),
        *(shlex.split(binding_args) if binding_args else ("--bind-to", "none")),
        *("--map-by", "slot"),
        *(("--mca", "plm_rsh_args", shlex.join(rsh)) if rsh else ()),
        *(("--mca", "oob_tcp_if_include", networks) if interfaces else ()),
        *(("--output-filename", str(output)) if output else ()),
        *(word for name in sorted({**exported(), **variables}) for word in ("-x", name)),
        *shlex.split(mpi_args),
        *command,
    ]


def meeting_place(topology: Topology, interfaces: Sequence[str]) -> dict[str, str]:
    """Where rank 0 listens, and for whom, if there are several hosts; on one, ranks find it."""
    others = [host.name for host in topology.hosts if host.name != HERE]
    if len(topology.hosts) == 1:
        return {}
    first = topology.hosts[0].name
    address = address_for(others, interfaces) if first == HERE else first
    port = str(secrets.choice(_PORTS))
    return {"MASTER_ADDR": address, "MASTER_PORT": port, TOKEN: new_token().decode()}

"""From what describes the hosts of a job to which rank is on which of them.

    -H a:4,b:4            ┐
    --hostfile FILE       ├──▶  hosts with slots  ──▶  `Topology`, and how to reach the hosts
    Slurm, PBS, LSF       ┘      (-n of them)

Names and addresses of this host become `localhost`, where workers are started directly.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from farandole.errors import UserError
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.slurm.channel import Srun
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.hosts import HERE, parse_hosts, place_workers
from farandole.launch.messages import tell
from farandole.launch.placement.host_file import HostEntry, read_host_file
from farandole.launch.placement.schedulers import SLURM, Allocation, find_allocation
from farandole.launch.placement.ssh_by_host import SshByHost
from farandole.topology import Topology
from farandole.worker.network import is_here


@dataclass(frozen=True)
class HostOptions:
    """The options of a command that say where workers go, as given; None: not given."""

    hosts: str | None = None
    hostfile: Path | None = None
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    network_interfaces: tuple[str, ...] = ()

    @property
    def interfaces(self) -> tuple[str, ...]:
        names = [name for given in self.network_interfaces for name in given.split(",") if name]
        return tuple(dict.fromkeys(names))

    def words(self) -> list[str]:
        """The same as words of a command line, for a command that starts another one."""
        given = {
            "-H": self.hosts,
            "--hostfile": self.hostfile,
            "--ssh-port": self.ssh_port,
            "--ssh-identity-file": self.ssh_identity_file,
            "--network-interfaces": ",".join(self.interfaces) or None,
        }
        return [
            str(word) for key, value in given.items() if value is not None for word in (key, value)
        ]


@dataclass(frozen=True)
class Placement:
    """Which rank is on which host, and how the hosts are reached."""

    topology: Topology
    channel: Channel  # by which the others are reached
    interfaces: tuple[str, ...] = ()
    note: str | None = None  # what the user should know about the way to the others
    entries: Mapping[str, HostEntry] = field(default_factory=dict)  # all, also those without ranks

    @classmethod
    def here(cls, workers: int) -> Placement:
        """All workers on this host."""
        return cls(Topology.single(workers, HERE), Ssh())

    @property
    def others(self) -> list[str]:
        """The hosts that are not this one."""
        return [host.name for host in self.topology.hosts if host.name != HERE]

    @property
    def workers_here(self) -> int:
        return sum(len(host.ranks) for host in self.topology.hosts if host.name == HERE)

    def tell_note(self) -> None:
        if self.note is not None and self.others:
            tell(self.note)

    @property
    def rank0_is_here(self) -> bool:
        return self.topology.host(0).name == HERE

    def slots_without(self, hosts: Collection[str]) -> int:
        """How many workers the others have room for."""
        return sum(entry.slots for name, entry in self.entries.items() if name not in hosts)

    def without(self, hosts: Collection[str], workers: int) -> Placement:
        """So many workers on the others."""
        slots = {name: each.slots for name, each in self.entries.items() if name not in hosts}
        return replace(self, topology=place_workers(slots, workers))


def place(
    options: HostOptions,
    workers: int | None,
    environ: Mapping[str, str] = os.environ,
    *,
    may_grow: bool = False,
) -> Placement | None:
    """`workers` ranks, or one for every slot, on the described hosts, filling one after the other.

    None where nothing describes any: the job is this host's. `may_grow`: other hosts may be added
    while it runs. Raises `UserError` for descriptions that cannot be, and where there are too few
    slots.
    """
    entries, allocation = _described(options, environ)
    if entries is None:
        _refuse_idle(options)
        return None
    own_name = None if allocation is None else allocation.own_name
    named = named_hosts(entries, own_name)
    slots = {name: entry.slots for name, entry in named.items()}
    if allocation is not None and workers is not None and workers > sum(slots.values()):
        raise _too_small(allocation, workers)
    topology = place_workers(slots, sum(slots.values()) if workers is None else workers)
    if set(named) == {HERE} and not may_grow:
        _refuse_idle(options)
    channel, note = _channel(options, named, allocation, environ)
    return Placement(topology, channel, options.interfaces, note, named)


def _channel(
    options: HostOptions,
    named: Mapping[str, HostEntry],
    allocation: Allocation | None,
    environ: Mapping[str, str],
) -> tuple[Channel, str | None]:
    """How the hosts are reached, and what the user should know about that.

    Nodes of Slurm by srun, because many sites allow no ssh to them; by ssh if the user gives an
    option of ssh.
    """
    ssh = SshByHost(options.ssh_port, options.ssh_identity_file, entries=named)
    is_slurm = allocation is not None and allocation.scheduler == SLURM
    if not is_slurm or options.ssh_port is not None or options.ssh_identity_file is not None:
        return ssh, None
    if shutil.which("srun", path=environ.get("PATH")) is not None:
        return Srun(), None
    others = ", ".join(name for name in named if name != HERE)
    return (
        ssh,
        f"there is no srun on the PATH: the nodes {others} of the Slurm job are reached by ssh",
    )


def named_hosts(entries: Sequence[HostEntry], own_name: str | None = None) -> dict[str, HostEntry]:
    """By the names that a job uses. Raises `UserError` where two are those of one host."""
    refuse_repeated(entries, own_name)
    return {_name(entry, own_name): entry for entry in entries}


def _described(
    options: HostOptions, environ: Mapping[str, str]
) -> tuple[Sequence[HostEntry] | None, Allocation | None]:
    if options.hosts is not None and options.hostfile is not None:
        raise UserError(f"-H {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    if options.hosts is not None:
        slots = parse_hosts(options.hosts, "-H", once=True)
        return [HostEntry(name, count) for name, count in slots.items()], None
    if options.hostfile is not None:
        return read_host_file(options.hostfile), None
    allocation = find_allocation(environ)
    return (None, None) if allocation is None else (allocation.hosts, allocation)


def _name(entry: HostEntry, own_name: str | None = None) -> str:
    if entry.name != own_name and not is_here(entry.name):
        return entry.name
    for key, value in (("port", entry.port), ("user", entry.user)):
        if value is not None:
            raise UserError(
                f"host {entry.name} with {key} = {value}: it is this host, where workers are "
                f"started without ssh. Leave out {key}, or give the name of another host."
            )
    return HERE


def refuse_repeated(entries: Sequence[HostEntry], own_name: str | None = None) -> None:
    """Raises `UserError` where two names are those of one host.

    Its workers would take each other's place: each name would have a worker with local rank 0.
    """
    seen: dict[tuple[str, int | None], str] = {}
    for entry in entries:
        is_own = _name(entry, own_name) == HERE
        where = (HERE if is_own else _address(entry.name), entry.port)
        if where in seen:
            raise UserError(
                f"{seen[where]} and {entry.name} are the same host. List it once, with all its "
                f"slots: {seen[where]}:4, say."
            )
        seen[where] = entry.name


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:  # perhaps ssh knows it, from its own settings
        return host


def _too_small(allocation: Allocation, workers: int) -> UserError:
    slots = sum(entry.slots for entry in allocation.hosts)
    listed = ", ".join(f"{entry.name}:{entry.slots}" for entry in allocation.hosts)
    return UserError(
        f"-n {workers}: the {allocation.scheduler} allocation has {slots} "
        f"slot{'s' if slots != 1 else ''} ({listed}). Ask for more "
        f"({allocation.ask_for_more} {workers}), start at most -n {slots}, or name the hosts "
        "yourself with -H."
    )


def _refuse_idle(options: HostOptions) -> None:
    given = {
        "--ssh-port": options.ssh_port,
        "--ssh-identity-file": options.ssh_identity_file,
        "--network-interfaces": ",".join(options.interfaces) or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UserError(
                f"{option} {value} is for other hosts, and all workers are on this one. Leave it "
                "out, or name other hosts with -H."
            )

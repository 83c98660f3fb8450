"""An emulated cluster: hosts as network namespaces of one machine, joined by slow links.

      emulated-0            switch            emulated-1
    ┌────────────┐      ┌────────────┐      ┌────────────┐     ▶ a token bucket: nothing leaves
    │       eth0 ▶──────◀ port0      │      │            │       here faster than the rate
    │ 198.18.0.1 │      │      port1 ▶──────◀ eth0       │
    └────────────┘      └────────────┘      └────────────┘

Every host has its own network, host name, /dev/shm and System V shared memory, so processes of
different hosts can only meet over TCP, as on real ones. They share cores, memory and files. The
switch is a namespace too: nothing is added to the machine's own network, and the firewall rules of
the machine do not apply.

The namespaces other than the network's have no name. A process that sleeps, the host's `init`,
keeps them, and others join it there.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from farandole.emulate.link import ShapedLink
from farandole.emulate.namespaces import (
    CLEAN,
    call,
    existing,
    new_prefix,
    remove,
    remove_leftovers,
    require_root,
)
from farandole.environment import EMULATED_ADDRESSES, EMULATED_HOST, EMULATED_HOSTS
from farandole.errors import LaunchError, UserError
from farandole.system.orphans import tied_to_this_process
from farandole.system.watchdog import Watchdog
from farandole.topology import EMULATED

MAX_HOSTS = 16
NETWORK = "198.18.0.0/24"
"""Of 198.18.0.0/15, which RFC 2544 sets aside for measuring networks: nobody's real address."""

_INTERFACE = "eth0"
_MASTER_PORT = "29500"  # torch's usual one; in a fresh network every port is free
# $0 is the host's name, $1 what /etc/hosts is to say of the cluster. No name server can be reached,
# so none is asked: a lookup that fails slowly would be part of every measurement. Two file systems
# are mounted over /dev/shm: the lower one holds these files, the upper one is what the host sees.
_INIT = """
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 names /dev/shm
{ cat /etc/hosts; echo; echo "$1"; } > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
if [ -e /etc/nsswitch.conf ]; then
  { grep -v '^hosts:' /etc/nsswitch.conf; echo 'hosts: files'; } > /dev/shm/nsswitch.conf
  mount --bind /dev/shm/nsswitch.conf /etc/nsswitch.conf
fi
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
exec sleep infinity
"""


class Cluster:
    """`hosts` emulated hosts; each one's link carries `rate` ("1gbit") in either direction.

    Use it as a context manager: it makes the hosts on entry, first removing those of emulators
    that were killed, and on exit kills every process on them and removes them. `delay` ("1ms") is
    the time from any host to any other; it needs a kernel with netem. Raises `UserError` for
    values that cannot be, without root, and when `network` is in use on this machine.
    """

    def __init__(
        self, hosts: int = 2, rate: str = "1gbit", delay: str | None = None, network: str = NETWORK
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise UserError(f"{hosts} emulated hosts cannot be; ask for 1 to {MAX_HOSTS}.")
        self.link = ShapedLink.parse(rate, delay)
        self.network = _network(network, hosts)
        self.names = [f"{EMULATED}{host}" for host in range(hosts)]
        addresses = self.network.hosts()
        self.addresses = [str(next(addresses)) for _ in range(hosts)]
        self.prefix = new_prefix()
        self._inits: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> Cluster:
        require_root()
        remove_leftovers()
        routes = json.loads(call("ip", "-4", "-json", "route", "show", "table", "all") or "[]")
        refuse_collision(self.network, [route["dst"] for route in routes])
        self._watchdog = Watchdog(command=CLEAN)
        try:
            self._make_switch()
            for host in range(len(self.names)):
                self._connect_host(host)
                self._inits.append(self._boot(host))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def namespace(self, host: int | str) -> str:
        """The name under which `ip netns` knows a host's network; that of the bridge: "switch"."""
        return f"{self.prefix}{host}"

    def variables(self, host: int) -> dict[str, str]:
        """What tells a command on which host it runs, under the names that launchers know."""
        return {
            EMULATED_HOST: str(host),
            EMULATED_HOSTS: str(len(self.names)),
            EMULATED_ADDRESSES: ",".join(self.addresses),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": _MASTER_PORT,
            "NODE_RANK": str(host),
            "NNODES": str(len(self.names)),
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "NCCL_SOCKET_IFNAME": _INTERFACE,
        }

    def start(
        self,
        host: int,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts `command` on a host and returns at once; the process is the command itself.

        It gets this process's environment, `variables(host)` and, above both, `env`; a session of
        its own; and no standard input. A command that does not exist ends with exit code 127.
        """
        if not 0 <= host < len(self._inits):
            raise UserError(f"there is no host {host} among {len(self._inits)} running ones.")
        enter = ["nsenter", "--target", str(self._inits[host].pid)]
        enter += ["--net", "--uts", "--ipc", "--mount", "env", f"--chdir={cwd or Path.cwd()}"]
        process = subprocess.Popen(
            [*enter, *map(str, command)],
            env={**os.environ, **self.variables(host), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kills every process on the hosts, whoever started it, and removes the hosts.

        Raises `LaunchError` naming what could not be removed.
        """
        for process in (*self._started, *self._inits):
            process.kill()  # one that has only just begun is not yet on its host
        try:
            remove(existing(self.prefix))
        finally:
            for init in self._inits:
                assert init.stdout is not None
                init.stdout.close()
            for process in (*self._started, *self._inits):
                process.wait(timeout=10)
            self._started.clear()
            self._inits.clear()
        if self._watchdog is not None:
            self._watchdog.close()

    def _make_switch(self) -> None:
        switch = self.namespace("switch")
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "switch0", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "switch0", "addrgenmode", "none", "up")

    def _connect_host(self, host: int) -> None:
        here, switch, port = self.namespace(host), self.namespace("switch"), f"port{host}"
        address = f"{self.addresses[host]}/{self.network.prefixlen}"
        call("ip", "netns", "add", here)
        call("ip", "link", "add", _INTERFACE, "netns", here,
             "type", "veth", "peer", "name", port, "netns", switch)  # fmt: skip
        # Delay on the way out only: a packet passes one host's way out and another's way in.
        self.link.shape(here, _INTERFACE, with_delay=True)
        self.link.shape(switch, port, with_delay=False)
        call("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "switch0")
        call("ip", "-n", switch, "link", "set", port, "up")
        call("ip", "-n", here, "link", "set", "lo", "up")
        # No automatic IPv6 address: nobody can use it in its first seconds, but gloo may try.
        call("ip", "-n", here, "link", "set", _INTERFACE, "addrgenmode", "none")
        call("ip", "-n", here, "address", "add", address, "dev", _INTERFACE)
        call("ip", "-n", here, "link", "set", _INTERFACE, "up")

    def _boot(self, host: int) -> subprocess.Popen[str]:
        """The process that keeps a host's namespaces. `ip netns exec` also gives it its own /sys
        and its own mounts."""
        enter = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "--ipc"]
        pairs = zip(self.addresses, self.names, strict=True)
        hosts_file = "\n".join(f"{address} {name}" for address, name in pairs)
        init = subprocess.Popen(
            [*enter, "sh", "-ec", _INIT, self.names[host], hosts_file],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=tied_to_this_process(),
        )
        assert init.stdout is not None
        said = init.stdout.readline().strip()
        if said != "ready":
            init.kill()
            said += init.stdout.read()
            init.communicate()
            raise LaunchError(f"host {self.names[host]} did not start: {said}")
        return init


def refuse_collision(network: ipaddress.IPv4Network, destinations: Iterable[str]) -> None:
    """Raises `UserError` when this machine already knows a way to an address of `network`.

    An address in a script would then mean a real host outside and an emulated one inside.
    Destinations so wide that they are a default route in disguise do not count.
    """
    for destination in destinations:
        if destination == "default":
            continue
        known = ipaddress.IPv4Network(destination)
        if known.prefixlen >= 8 and known.overlaps(network):
            raise UserError(
                f"the emulated network {network} collides with {known}, which this machine has a "
                "route to. Choose a free one, such as --network 10.213.0.0/24."
            )


def _network(text: str, hosts: int) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise UserError(f"network {text!r}: {error}. Write it like {NETWORK}.") from None
    if network.num_addresses - 2 < hosts:
        raise UserError(f"network {text} has too few addresses for {hosts} hosts. Try {NETWORK}.")
    return network

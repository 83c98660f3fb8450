"""ssh with a port and a user name of its own for some hosts, as a host file in TOML gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.placement.host_file import HostEntry


@dataclass(frozen=True)
class SshByHost(Ssh):
    """What a host's entry says takes precedence over what holds for all hosts."""

    entries: Mapping[str, HostEntry] = field(default_factory=dict)

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        return self._plain(host).words(self._target(host), command)

    def advice(self, host: str) -> str:
        return self._plain(host).advice(self._target(host))

    def _plain(self, host: str) -> Ssh:
        entry = self.entries.get(host)
        plain = Ssh(self.port, self.identity_file, self.connect_seconds)
        return plain if entry is None or entry.port is None else replace(plain, port=entry.port)

    def _target(self, host: str) -> str:
        entry = self.entries.get(host)
        return host if entry is None or entry.user is None else f"{entry.user}@{host}"

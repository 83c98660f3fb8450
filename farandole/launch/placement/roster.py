"""The hosts of a job whose workers come and go: a host file is read again while the job runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from farandole.errors import UserError
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.placement.host_file import HostEntry, read_host_file
from farandole.launch.placement.placement import HostOptions, named_hosts
from farandole.launch.placement.ssh_by_host import SshByHost


class HostRoster:
    """`channel` knows how to reach hosts that are added later, too."""

    def __init__(
        self, options: HostOptions, entries: Mapping[str, HostEntry], channel: Channel
    ) -> None:
        self._file = options.hostfile
        self._slots = {name: entry.slots for name, entry in entries.items()}
        self._entries = dict(entries)  # also of hosts that were removed: ssh may be asked for them
        self._content = None if self._file is None else _content(self._file)
        self._changed: bytes | None = None
        self.channel = channel
        if self._file is not None:  # hosts of a file are reached by ssh
            port, key = options.ssh_port, options.ssh_identity_file
            self.channel = SshByHost(port, key, entries=self._entries)

    def slots(self) -> dict[str, int]:
        """Those of this moment, in order. Raises `UserError` for a file that cannot be used."""
        if self._file is not None:
            self._read_again(self._file)
        return dict(self._slots)

    def _read_again(self, path: Path) -> None:
        content = _content(path)
        if content == self._content:
            self._changed = None
            return
        if content != self._changed:
            # Somebody may be writing it, and half a list would take hosts away. A change holds
            # when it is seen twice.
            self._changed = content
            return
        named = named_hosts(read_host_file(path))
        self._content, self._changed = content, None
        self._entries.update(named)
        self._slots = {name: entry.slots for name, entry in named.items()}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the host file {path} cannot be read: {error}.") from error

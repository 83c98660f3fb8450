"""Real OpenSSH between hosts of this machine: for tests and benchmarks of jobs on several hosts.

The keys, the server's settings and the client's are files of one private folder, made for the
occasion. The user's own ~/.ssh is neither read nor written: ssh takes its home from the system, so
a small program called `ssh` that names the other settings comes first on the PATH.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from farandole.emulate.cluster import Cluster
from farandole.errors import LaunchError, UserError

_PORT = 22
_START_SECONDS = 100.0
_POLL_SECONDS = 0.02
_SEPARATION = Path("/run/sshd")  # where sshd, started by root, confines its untrusted half
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
ListenAddress {address}
Port {port}
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
"""
_CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
"""
_ALL_HOSTS = """\
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  UpdateHostKeys no
"""


class SshAccess:
    """Makes its files in `folder`, whose name has no spaces. Raises `UserError` without OpenSSH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sshd = _find("sshd")
        for name in ("host_key", "user_key"):
            self.make_key(name)
        self._known: dict[str, tuple[str, int]] = {}
        self._write_client()
        wrapper = self.path_folder / "ssh"
        wrapper.parent.mkdir(exist_ok=True)
        words = shlex.join([_find("ssh"), "-F", str(folder / "client")])
        wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        wrapper.chmod(0o755)

    @property
    def path_folder(self) -> Path:
        """To be put in front of PATH."""
        return self.folder / "bin"

    def make_key(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        words = [_find("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

    def server(
        self, name: str, address: str, port: int, variables: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command of a server that clients know as `name`. It stays in the foreground.

        Sessions there start with `variables`, in which sshd allows no quotes.
        """
        settings = self.folder / f"server-{name}"
        text = _SERVER.format(folder=self.folder, address=address, port=port)
        pairs = " ".join(f'"{key}={value}"' for key, value in (variables or {}).items())
        settings.write_text(text + (f"SetEnv {pairs}\n" if pairs else ""))
        self._known[name] = address, port
        self._write_client()
        if os.geteuid() == 0:
            _SEPARATION.mkdir(mode=0o755, exist_ok=True)
        return [self._sshd, "-D", "-e", "-f", str(settings)]

    def start_server(
        self, cluster: Cluster, host: int, variables: Mapping[str, str] | None = None
    ) -> None:
        """On an emulated host, under its name and at the usual port. It ends with the cluster.

        Returns when it listens. Raises `LaunchError` with what it said when it does not.
        """
        name = cluster.names[host]
        words = self.server(name, cluster.addresses[host], _PORT, variables)
        log = self.folder / f"server-{name}.log"
        with log.open("w") as sink:
            process = cluster.start(host, words, stderr=sink)
        deadline = time.monotonic() + _START_SECONDS
        while "Server listening" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"the ssh server of {name} does not start: {log.read_text()}")
            time.sleep(_POLL_SECONDS)

    def _write_client(self) -> None:
        """Every server has the same key, so that one line tells it for each address."""
        key = (self.folder / "host_key.pub").read_text()
        known = "".join(f"[{address}]:{port} {key}" for address, port in self._known.values())
        known += "".join(
            f"{address} {key}" for address, port in self._known.values() if port == _PORT
        )
        (self.folder / "known_hosts").write_text(known)
        hosts = "".join(
            _CLIENT.format(name=name, address=address, port=port)
            for name, (address, port) in self._known.items()
        )
        (self.folder / "client").write_text(hosts + _ALL_HOSTS.format(folder=self.folder))


def _find(program: str) -> str:
    # sshd refuses to be started by a relative name, and is where only root's PATH leads.
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise UserError(f"there is no {program}. Debian: apt install openssh-server openssh-client")
    return found

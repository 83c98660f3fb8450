"""Real OpenSSH servers on emulated hosts, with keys that are made for the test alone.

`ssh` on the PATH of `variables` is the real one. It reads a configuration of the test's own, so
nothing of the user's settings, keys and known hosts takes part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from farandole.emulate.cluster import Cluster

START_SECONDS = 100.0
SERVER = """
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
CLIENT = """
Host *
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""
SSH = """#!/bin/sh
exec {ssh} -F {folder}/config "$@"
"""


class SshServers:
    """On every host of `cluster` but the first. They end with the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folder = folder
        for name in ("host", "user", "stranger"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        key = (folder / "host.pub").read_text()
        known = zip(cluster.names, cluster.addresses, strict=True)
        (folder / "known").write_text("".join(f"{name},{address} {key}" for name, address in known))
        (folder / "config").write_text(CLIENT.format(folder=folder))
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(SSH.format(ssh=shutil.which("ssh"), folder=folder))
        wrapper.chmod(0o755)
        for host in range(1, len(cluster.names)):
            self._start(cluster, host)

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}"}

    @property
    def key(self) -> Path:
        """The one that the servers accept."""
        return self._folder / "user"

    @property
    def wrong_key(self) -> Path:
        """One that no server accepts."""
        return self._folder / "stranger"

    def _start(self, cluster: Cluster, host: int) -> None:
        config, log = self._folder / f"sshd-{host}", self._folder / f"sshd-{host}.log"
        config.write_text(SERVER.format(address=cluster.addresses[host], folder=self._folder))
        # The folder is the server's own for its unprivileged part; systemd makes it elsewhere.
        start = f'mkdir -p /run/sshd && exec {shutil.which("sshd")} -D -e -f "$0"'
        with log.open("w") as sink:
            process = cluster.start(host, ["sh", "-c", start, config], stderr=sink)
        deadline = time.monotonic() + START_SECONDS
        while "Server listening" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

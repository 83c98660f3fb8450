"""Other hosts by ssh, as the user's own configuration has it.

ssh asks nobody for a password, nor whether a host's unknown key is the right one: both would leave
the job waiting. Everything else, such as ProxyJump, agent forwarding and user names, is left to
~/.ssh/config.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_AGENT_SECONDS = 90.0  # for Python to start there, perhaps from a slow network file system
_ALIVE_SECONDS = 15  # ssh gives up a host that three times did not answer within this time


@dataclass(frozen=True)
class Ssh:
    """A `Channel` over the `ssh` of this host."""

    name: ClassVar[str] = "ssh"
    port: int | None = None
    identity_file: Path | None = None
    connect_seconds: int = 30

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`, whose shell reads it as it is meant here."""
        return [
            "ssh",
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_seconds}"),
            *("-o", f"ServerAliveInterval={_ALIVE_SECONDS}"),
            *self._options(),
            host,
            shlex.join(command),
        ]

    def advice(self, host: str) -> str:
        tried = shlex.join(["ssh", "-o", "BatchMode=yes", *self._options(), host, "true"])
        return f"Try `{tried}`, which must end without an error."

    def address_of(self, host: str) -> str:
        return host

    def _options(self) -> list[str]:
        given = {"-p": self.port, "-i": self.identity_file}
        return [str(word) for flag, value in given.items() if value for word in (flag, value)]


def answer_seconds(ssh: Ssh) -> float:
    """How long a host may take to answer: for the connection, and then for its agent to start."""
    return ssh.connect_seconds + _AGENT_SECONDS

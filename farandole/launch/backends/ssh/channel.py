"""Other hosts by ssh, as the user's own configuration has it.

ssh asks nobody for a password and accepts no key of a host that it does not know: both would leave
the job waiting. Everything else, such as ProxyJump, agent forwarding and user names, is left to
~/.ssh/config.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ALIVE_SECONDS = 15  # ssh gives up a host that three times did not answer within this time


@dataclass(frozen=True)
class Ssh:
    """A `Channel` over the `ssh` of this host."""

    port: int | None = None
    identity_file: Path | None = None
    connect_seconds: int = 30

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`, whose shell reads it as it is meant here."""
        given = {"-p": self.port, "-i": self.identity_file}
        return [
            "ssh",
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_seconds}"),
            *("-o", f"ServerAliveInterval={_ALIVE_SECONDS}"),
            *(str(word) for flag, value in given.items() if value for word in (flag, value)),
            host,
            shlex.join(command),
        ]

    def advice(self, host: str) -> str:
        given = {"-p": self.port, "-i": self.identity_file}
        options = [str(word) for flag, value in given.items() if value for word in (flag, value)]
        tried = shlex.join(["ssh", "-o", "BatchMode=yes", *options, host, "true"])
        return f"Try `{tried}`: it must end without a question and without a word."

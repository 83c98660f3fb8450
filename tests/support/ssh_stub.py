"""An `ssh` that runs commands on this host, for tests of what may go wrong on another one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox


def path_with_ssh(sandbox: Sandbox, before: str) -> str:
    """A PATH on which `ssh` runs its last word here, after the shell commands `before`."""
    folder = sandbox.folder / "bin"
    folder.mkdir()
    run = 'exec setsid --wait sh -c "$command"'
    (folder / "ssh").write_text(f"#!/bin/sh\nfor command; do :; done\n{before}\n{run}\n")
    (folder / "ssh").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"

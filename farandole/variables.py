"""Names of the environment variables by which a job's processes find its parameter servers."""

from __future__ import annotations

from typing import Final

SERVERS: Final = "FARANDOLE_SERVERS"
"""The address of the servers' registrar."""
SERVER_KEY: Final = "FARANDOLE_SERVER_KEY"
"""The file with the job's key."""

"""Names of environment variables by which a job's processes find what they need of it."""

from __future__ import annotations

from typing import Final

SERVERS: Final = "FARANDOLE_SERVERS"
"""The address of the servers' registrar."""
SERVER_KEY: Final = "FARANDOLE_SERVER_KEY"
"""The file with the job's key."""
ELASTIC_WORKER: Final = "FARANDOLE_ELASTIC_WORKER"
"""The number of an elastic job's worker, which lasts while its process does. Ranks change."""

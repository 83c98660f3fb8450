"""Names of environment variables by which a job's processes find what they need of it."""

from __future__ import annotations

from typing import Final

SERVERS: Final = "FARANDOLE_SERVERS"
"""The address of the servers' registrar."""
SERVER_KEY: Final = "FARANDOLE_SERVER_KEY"
"""The file with the job's key."""
ELASTIC_WORKER: Final = "FARANDOLE_ELASTIC_WORKER"
"""The number of an elastic job's worker, which lasts while its process does. Ranks change."""
FORK: Final = "FARANDOLE_FORK"
"""0: workers are always fresh processes, and never forked from one that has imported torch."""
FORKS: Final = "FARANDOLE_FORKS"
"""By which a launcher that was forked finds its own fork server: a descriptor and a process id."""
RESERVED: Final = "FARANDOLE_RESERVED"
"""Room for variables that a forked process shows as its own."""
GRACE: Final = "FARANDOLE_GRACE"
"""How many seconds a worker has between SIGTERM and SIGKILL."""
STARTED: Final = "FARANDOLE_STARTED"
"""When a race started a lane, by the system's monotonic clock."""

"""A cluster that does nothing; prints the process ids of its servers."""

from __future__ import annotations

import time

from farandole.server import Cluster

with Cluster(servers=1) as cluster:
    print(*cluster.pids, flush=True)
    time.sleep(600)

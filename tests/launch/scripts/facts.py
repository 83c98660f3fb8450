"""Joins, and prints what this rank knows about itself as one line of JSON.

With --own-group it forms torch's process group itself, as a script written for torchrun may.
"""

import json
import os
import sys

import psutil
import torch.distributed as dist

import farandole as fd

OPEN_TO_OTHERS = (psutil.CONN_LISTEN, psutil.CONN_NONE)  # TCP that listens, and UDP

interface = os.environ.get("GLOO_SOCKET_IFNAME")
if "--own-group" in sys.argv:
    dist.init_process_group("gloo")
run = fd.init(timeout=150)
own = psutil.Process()
observed = [own]
if "FARANDOLE_JOB" in os.environ:
    observed.append(own.parent())
facts = {
    "rank": run.rank,
    "size": run.size,
    "local": [run.local_rank, run.local_size],
    "hosts": len(run.topology.hosts),
    "sum": run.sum(float(run.rank)),
    "arguments": sys.argv[1:],
    "script": sys.argv[0],
    "name": run.name,
    "folder": str(run.folder),
    "seed": run.seed,
    "sync": str(run.settings.sync),
    "interface": interface,
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "listening": [
        [end.laddr.ip for end in process.net_connections("inet") if end.status in OPEN_TO_OTHERS]
        for process in observed
    ],
}
# In one piece: print writes several, and other launchers let those of two ranks meet in a line.
sys.stdout.write(f"facts {json.dumps(facts)}\n")
print("to standard error", file=sys.stderr)
run.group.barrier()

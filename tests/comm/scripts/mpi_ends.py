"""mpi_ends.py raise | never: rank 1 raises, or never joins; what becomes of the others?"""

import os
import sys
import time
from datetime import timedelta

how = sys.argv[1]
if how == "never" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(600)

from farandole.comm import Group  # noqa: E402
from farandole.comm.transports.mpi_world import mpi_world  # noqa: E402

group = Group(mpi_world(timedelta(seconds=2 if how == "never" else 60)))
print(group.topology, flush=True)
if group.rank == 1:
    raise KeyError("lost on rank one")
group.barrier()

"""The last rank never calls `fd.init`; the others give up after a while."""

import os
import time

import farandole as fd

rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
if rank == size - 1:
    time.sleep(600)
fd.init(timeout=2)

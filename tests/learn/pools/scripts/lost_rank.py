"""A rank of a run with parameter servers dies in the second pass. The others say what they see."""

import os
import signal

import numpy as np

import farandole as fd
from farandole.learn.linear.moments import MomentSum
from farandole.learn.pools.ranks import Ranks
from farandole.learn.pools.workers import LostPoolError
from farandole.learn.sources.source import Source

run = fd.init(timeout=150)
with Ranks(run.group).place(Source(np.ones((60, 2)), chunk_rows=10)) as placed:
    placed.sum(MomentSum())
    if run.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        placed.sum(MomentSum())
    except LostPoolError as error:
        print(f"rank {run.rank}: {error}")

"""Saves a small state, then one larger than a file may be here; says how that failed."""

import resource
import signal
import sys

import torch

import farandole as fd

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the process is killed, not refused
run = fd.init(folder=sys.argv[1], name="limited")
run.save(small=torch.zeros(10))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    run.save(large=torch.zeros(2**16))
except fd.CheckpointError as error:
    print(f"refused: {error}")

"""elastic_worker.py: takes ranks, writes down each, and stays until something calls it away.

Files in the current folder say what: again-N stands for a collective of generation N that broke,
`finish` for the end of the training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from farandole.environment import ELASTIC_WORKER
from farandole.worker.elastic import hosts_changed, is_elastic, next_assignment, note_state

assert is_elastic(os.environ)
child = subprocess.Popen(["sleep", "600"])  # as a data loader has them
generation = -1
while True:
    assignment = next_assignment(os.environ, generation, timedelta(seconds=60))
    note_state(os.environ)
    generation = assignment.attempt
    facts = (assignment.rank, assignment.size, assignment.local_rank, assignment.local_size)
    words = (*facts, os.environ[ELASTIC_WORKER], os.getpid())
    note = Path(f"assignment-{generation}-{assignment.rank}")
    note.with_suffix(".half").write_text(" ".join(map(str, words)))
    note.with_suffix(".half").rename(note)
    print(f"has rank {assignment.rank} of {assignment.size}")
    while not Path(f"again-{generation}").exists() and not hosts_changed(os.environ, generation):
        if Path("finish").exists():
            sys.exit()
        time.sleep(0.02)

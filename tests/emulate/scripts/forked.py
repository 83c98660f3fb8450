"""forked.py MODULE…: runs scripts in processes forked from this one, which has imported these.

Importing torch is what takes long in a process, and here it is done once for many. Each line of
input is a request, in JSON: in which folder to run which arguments (a script or -m module, and what
follows), and the variables of each rank. All ranks run at once. Each is a process in a session of
its own, writes to <rank>.out and <rank>.err, and ends as any interpreter does; then the exit codes
are printed. Their own code, Farandole's too, is imported by each of them anew.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any


def fork(requests: Any) -> tuple[dict[str, Any], int] | None:
    """Returns the request and the rank in each process that is forked; in this one, at the end."""
    for line in requests:
        request = json.loads(line)
        pids = []
        for rank in range(len(request["ranks"])):
            pid = os.fork()
            if not pid:
                return request, rank
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    return None


def begin(folder: str, variables: dict[str, str], rank: int) -> None:
    """As if this process had been started there, with these variables."""
    os.setsid()
    os.chdir(folder)
    for descriptor, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(name, mode), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # to be found again, by the new variables


def run(first: str, *rest: str) -> None:
    """What the interpreter does with its arguments."""
    if first == "-m":
        sys.argv = list(rest)
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


for module in sys.argv[1:]:
    importlib.import_module(module)
gc.freeze()  # else each process looks through all of torch once more when it ends
forked = fork(sys.stdin)
if forked is not None:
    request, rank = forked
    begin(request["folder"], request["variables"] | request["ranks"][rank], rank)
    run(*request["arguments"])

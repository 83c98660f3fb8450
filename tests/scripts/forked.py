"""forked.py MODULE VARIABLES SCRIPT ARGUMENT…: runs it once for each set of variables, all at once.

Each is a process of its own, forked from this one, which has imported the module already, because
that is what takes long. It writes to <number>.out and <number>.err. Prints the exit codes as JSON.
"""

import gc
import importlib
import json
import os
import runpy
import sys

_, module, sets, *sys.argv = sys.argv
importlib.import_module(module)
gc.freeze()  # else each process looks through all of the module once more when it ends
pids = []
for number, variables in enumerate(json.loads(sets)):
    pid = os.fork()
    if not pid:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.update(variables)
        runpy.run_path(sys.argv[0], run_name="__main__")
        break
    pids.append(pid)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))

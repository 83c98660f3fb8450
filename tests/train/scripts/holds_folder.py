"""holds_folder.py FOLDER: saves once as the run "shared", says so, and waits to be ended.

With a second argument, forks a child that outlives it, says the child's process id as well, and
leaves the child behind when it is killed.
"""

import os
import sys
import time

import torch

import farandole as fd

run = fd.init(name="shared", folder=sys.argv[1])
model = torch.nn.Linear(2, 2)
run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
made = run.save(best=1)
child = 0
if len(sys.argv) > 2:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b".")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
print(os.getpid(), child, made, flush=True)
time.sleep(600)

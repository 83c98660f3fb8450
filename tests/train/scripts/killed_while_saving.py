"""Forks a process that saves without end, kills it somewhere in a save, and says what is left.

Several times over, one JSON line each. Forked, because importing torch takes longer than all else.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import farandole as fd
from farandole.train.checkpoint import checkpoint


def save_for_ever(folder: str, tell: int, *, background: bool) -> None:
    run = fd.init(folder=folder, name="endless")
    model = torch.nn.Linear(64, 64)
    run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    for count in itertools.count():
        torch.nn.init.constant_(model.weight, float(count))
        run.save(count=count, keep=2, background=background and count > 0)
        os.write(tell, b".")


def main(folder: str, kills: int, *, background: bool) -> None:
    checkpoints = Path(folder) / "endless/checkpoints"
    torch.optim.SGD([torch.zeros(1)], 0.1)  # imports what torch leaves for later
    for kill in range(kills):
        listen, tell = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(folder, tell, background=background)
        os.close(tell)
        told = len(os.read(listen, 1))  # it is in its loop
        time.sleep(0.003 * kill)  # somewhere else in the save every time
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(listen, "rb") as rest:
            told += len(rest.read())
        newest = checkpoint.newest(checkpoints)
        parts = checkpoint.read(newest)
        answer = {
            "told": told,
            "number": int(newest.name),
            "count": parts["state"]["count"],
            "weights": parts["model-0"]["weight"].unique().tolist(),
            "half": [path.name for path in checkpoints.iterdir() if path.name.endswith(".tmp")],
        }
        print(json.dumps(answer), flush=True)


main(sys.argv[1], int(sys.argv[2]), background="background" in sys.argv)

"""like_fresh.py: says what a script can see of its process, as JSON."""

import json
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
from pathlib import Path

was_there = [name for name in ("torch", "numpy") if name in sys.modules]


class Mine:
    """A class of `__main__`."""


def square(number: int) -> int:
    return number * number


def seen() -> dict[str, object]:
    import numpy
    import torch

    return {
        "was_there": was_there,
        "name": __name__,
        "file": __file__,
        "argv": sys.argv,
        "path": sys.path[0],
        "cwd": str(Path.cwd()),
        "spec": __spec__,
        "doc": __doc__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
        "leader": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "threads": torch.get_num_threads(),
        "parallel": [
            line for line in torch.__config__.parallel_info().splitlines() if "threads" in line
        ],
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "temporary": tempfile.gettempdir(),
        "write_through": (sys.stdout.write_through, sys.stdout.line_buffering, sys.stdout.isatty()),
        "encoding": (sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdin.encoding),
        "names": (sys.stdin.name, sys.stdout.name, sys.stderr.name, sys.stdout.mode),
        "flags": list(sys.flags),
        "executable": sys.executable,
        "torch_seed": torch.initial_seed(),
        "random": (random.random(), float(numpy.random.rand())),
        "spawned": multiprocessing.get_context("spawn").Pool(1).map(square, [3]),
    }


if __name__ == "__main__":
    print("seen " + json.dumps(seen()))

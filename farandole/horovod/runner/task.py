"""What a worker of `horovod.run()` runs: `python -m farandole.horovod.runner.task FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from farandole.horovod.runner.parcels import read_parcel, write_parcel
from farandole.horovod.runner.reference import Reference
from farandole.system.orphans import end_with_launcher
from farandole.worker.failure import record_uncaught


def perform(folder: Path) -> None:
    """Calls the function that the folder names, and leaves there what it returned."""
    call = read_parcel(folder / "call.safetensors")
    func = Reference(**call["function"]).find()
    result = func(*call["args"], **call["kwargs"])
    rank = os.environ["RANK"]
    what = f"what {func.__name__}() returned on rank {rank}"
    write_parcel(folder / f"result-{rank}.safetensors", result, what)


if __name__ == "__main__":
    record_uncaught()
    end_with_launcher(os.environ)
    perform(Path(sys.argv[1]))

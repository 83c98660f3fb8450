"""late_writer.py FOLDER: rank 0 gives up an all-reduce; rank 1 goes on with it afterwards.

Rank 1 writes its part of the result into the memory of rank 0, as it was registered. Rank 0 uses
its tensor for something else by then, and must not see it.
"""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from worlds import run_world

from farandole.comm import Group
from farandole.comm.arithmetic import Op
from farandole.comm.transports.shm import in_place
from farandole.errors import CommError

FOLDER = Path(sys.argv[1])
LENGTH = 100_003
reduce_now = in_place.OwnedPiece.reduce


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 30
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"{name} did not come"
        time.sleep(0.01)


def reduce_late(self: in_place.OwnedPiece, op: Op) -> None:
    wait_for("given-up")
    reduce_now(self, op)
    (FOLDER / "written").touch()


def body(group: Group) -> None:
    mine = torch.ones(LENGTH)
    group.register(mine).__enter__()
    beside = group.subgroup([0, 1])
    if group.rank == 1:
        in_place.OwnedPiece.reduce = reduce_late  # type: ignore[method-assign]
    try:
        group.all_reduce(mine)
    except CommError as error:
        print(f"rank {group.rank}: {str(error).split(':')[0]}", flush=True)
    if group.rank == 0:
        mine.fill_(7)
        (FOLDER / "given-up").touch()
        wait_for("written")
        assert (mine == 7).all(), "another rank has written into it"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        beside.register(mine).__enter__()
    if group.rank == 0:
        (warning,) = told
        print(str(warning.message).split(", so")[0], flush=True)
    in_place.OwnedPiece.reduce = reduce_now  # type: ignore[method-assign]
    mine.fill_(1)
    beside.all_reduce(mine)
    assert (mine == 2).all(), "the second group reads memory that rank 0 no longer uses"


if __name__ == "__main__":
    sys.exit(not run_world("shm", 2, timedelta(seconds=2), body))

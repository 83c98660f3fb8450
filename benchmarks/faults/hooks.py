"""How a training script tells the harness where it is, and waits there for the fault.

The environment says in which phase which ranks wait. A rank that reaches a phase writes a file with
its process id, whole or not at all; the ranks that wait do so until the file `go` is there. Nothing
here sleeps to be likely somewhere: a fault strikes when the files say that everybody is in place.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PHASE = "FARANDOLE_DRILL_PHASE"
RANKS = "FARANDOLE_DRILL_RANKS"
TAG = "FARANDOLE_DRILL_TAG"  # of the files of a job that is not the drill's first
NAN = "FARANDOLE_DRILL_NAN"  # the rank whose data are spoilt
STOPPED = "FARANDOLE_DRILL_STOPPED"  # set: the script saves when it is told to stop
LOADER = "FARANDOLE_DRILL_LOADER"  # set: batches come from processes
_LONGEST_SECONDS = 120.0  # a script whose harness is gone must not wait for ever
_HERE = Path.cwd()


def rank() -> int:
    """Also before anything has been joined."""
    return int(os.environ.get("RANK", "0"))


def reach(phase: str, who: int | None = None) -> None:
    """Says that this rank is in `phase`; waits there if it is one of those that shall."""
    who = rank() if who is None else who
    reached = _file(phase, who)
    if reached.exists():
        return
    half = reached.with_suffix(".half")
    half.write_text(str(os.getpid()))
    half.rename(reached)
    if phase == os.environ.get(PHASE) and _waits(who):
        _wait_for([_HERE / "go"])


def meet(size: int) -> None:
    """All ranks have imported what they need: from here on they arrive together."""
    if os.environ.get(PHASE) != "set-up":
        reach("imported")
        _wait_for([_file("imported", other) for other in range(size)])


def stepped(who: int | None = None) -> None:
    """One more step has been taken: the harness reads when."""
    with (_HERE / f"steps-{rank() if who is None else who}").open("a") as file:
        file.write(f"{time.monotonic()}\n")


def _file(phase: str, who: int) -> Path:
    return _HERE / f"reached{os.environ.get(TAG, '')}-{phase.replace(' ', '_')}-{who}"


def _waits(who: int) -> bool:
    ranks = os.environ.get(RANKS, "all")
    return ranks == "all" or str(who) in ranks.split(",")


def _wait_for(files: list[Path]) -> None:
    end = time.monotonic() + _LONGEST_SECONDS
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            raise TimeoutError(f"never there: {', '.join(file.name for file in files)}")
        time.sleep(0.01)

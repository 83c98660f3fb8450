"""How a job ended, as a file for the program that started its launcher: see `farandole.race`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from farandole.files import write_whole
from farandole.launch.job import Outcome


@dataclass(frozen=True)
class OutcomeRecord:
    """`problem` is one line on why the job failed, or empty; `joined` is as in `Outcome`."""

    problem: str
    joined: bool
    is_out_of_memory: bool = False  # of a GPU


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Raises `FarandoleError` where it cannot be written."""
    problem = ""
    if outcome.stopped_by is not None:
        problem = f"stopped by {outcome.stopped_by}"
    elif outcome.failure is not None:
        said = [line.strip() for line in outcome.failure.error.splitlines() if line.strip()]
        problem = said[-1] if said else str(outcome.failure)
    out_of_memory = outcome.failure is not None and outcome.failure.is_out_of_memory
    record = OutcomeRecord(problem, outcome.joined, out_of_memory)
    write_whole(path, json.dumps(asdict(record)).encode())


def read_outcome(path: Path) -> OutcomeRecord | None:
    """None where there is none: the launcher could not start the job, or was killed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        return OutcomeRecord(
            str(found["problem"]), bool(found["joined"]), bool(found["is_out_of_memory"])
        )
    return None

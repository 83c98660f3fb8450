"""Two jobs save into one folder at the same time: is a checkpoint broken, mixed or lost?

Two jobs of two ranks each save small checkpoints into one folder, as fast as they can. Every
checkpoint carries one number in all its parts, which no other has: weights, momentum, the script's
own state and each rank's random state. Two rounds:

- locked: one job saves and the other is refused, tries again and again, and goes on where the
  first is killed with SIGKILL in the middle of the round.
- unlocked: `flock` fails, as on file systems that have no locks. Both jobs save all the time.

In the end every checkpoint in the folder is read. Broken: refused by `checkpoint.read`. Mixed: its
parts carry different numbers. Lost: a save returned, and its checkpoint is not there or carries
another number.

    python benchmarks/two_savers.py
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import save

import farandole as fd
from farandole.train.checkpoint import checkpoint

WORKERS = 2
EVERYTHING = 10**9  # checkpoints to keep


def save_for_ever(folder: Path, job: int, rank: int) -> None:
    """One rank of a job. Rank 0 writes down what each save returned, and each refusal."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    events = os.open(folder / f"job-{job}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    run = fd.init(name="shared", folder=folder)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.distribute(model, optimizer)
    parent = os.getppid()
    for count in itertools.count():
        if os.getppid() != parent:  # the benchmark itself was killed
            return
        number = 1_000_000 * (job + 1) + count
        torch.nn.init.constant_(model.weight, float(number))
        optimizer.state[model.weight]["momentum_buffer"] = torch.full((64, 64), float(number))
        torch.manual_seed(number)
        event: dict[str, Any] = {"number": number}
        try:
            event["path"] = str(run.save(keep=EVERYTHING, number=number))
        except (fd.CheckpointError, OSError) as error:
            event["refused"] = str(error)
            time.sleep(0.02)
        event["time"] = time.monotonic()
        if rank == 0:
            os.write(events, (json.dumps(event) + "\n").encode())


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def start(folder: Path, job: int, *, locked: bool) -> list[int]:
    """Forks the ranks of a job; returns their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pids = []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="localhost")
            os.environ.update(MASTER_PORT=port)
            os.dup2(os.open(folder / f"job-{job}.log", os.O_WRONLY | os.O_CREAT), 1)
            if not locked:
                fcntl.flock = no_locks  # type: ignore[assignment]
            try:
                save_for_ever(folder, job, rank)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def events_of(folder: Path, job: int) -> list[dict[str, Any]]:
    """What rank 0 wrote down; the last line may be cut."""
    file = folder / f"job-{job}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_events(folder: Path, jobs: list[int]) -> None:
    limit = time.monotonic() + 120
    while not all(events_of(folder, job) for job in jobs):
        if time.monotonic() > limit:
            sys.exit(f"the jobs {jobs} do not begin to save; see {folder}")
        time.sleep(0.05)


def numbers_in(path: Path) -> set[int]:
    """Of all parts of a checkpoint. Raises `CheckpointError`."""
    parts = checkpoint.read(path)
    (moments,) = parts["optimizer-0"]["named"].values()
    seen = {int(value) for value in parts["model-0"]["weight"].unique()}
    seen |= {int(value) for value in moments["momentum_buffer"].unique()}
    seen.add(parts["state"]["number"])
    for rank in range(WORKERS):
        state = parts[f"rank-{rank}"]["random"]["torch"]
        generator = torch.Generator()
        generator.set_state(state)
        seen.add(generator.initial_seed())
    return seen


def judge(folder: Path) -> dict[str, Any]:
    """Reads every checkpoint, and compares with what the jobs were told."""
    place = folder / "shared" / "checkpoints"
    found: dict[str, int] = {}
    broken, mixed = [], []
    for path in sorted(path for path in place.iterdir() if path.name.isdigit()):
        try:
            numbers = numbers_in(path)
        except (fd.CheckpointError, KeyError) as error:
            broken.append(f"{path.name}: {error}")
            continue
        if len(numbers) > 1:
            mixed.append(f"{path.name}: {sorted(numbers)}")
        found[path.name] = min(numbers)
    events = [event for job in (0, 1) for event in events_of(folder, job)]
    told = [event for event in events if "path" in event]
    lost = [event for event in told if found.get(Path(event["path"]).name) != event["number"]]
    return {
        "committed": len(found) + len(broken),
        "broken": len(broken),
        "mixed": len(mixed),
        "told": len(told),
        "lost": len(lost),
        "refused": sum("refused" in event for event in events),
        "by_job": [sum("path" in event for event in events_of(folder, job)) for job in (0, 1)],
        "examples": (broken + mixed)[:3],
    }


def locked_round(seconds: float) -> dict[str, Any]:
    """The first job is killed halfway; the second waits for its turn from the beginning."""
    with tempfile.TemporaryDirectory(prefix="two-savers-") as name:
        folder = Path(name)
        first = start(folder, 0, locked=True)
        wait_for_events(folder, [0])
        second = start(folder, 1, locked=True)
        wait_for_events(folder, [1])
        time.sleep(seconds / 2)
        kill(first)
        killed = time.monotonic()
        time.sleep(seconds / 2)
        kill(second)
        result = judge(folder)
        later = [event["time"] - killed for event in events_of(folder, 1) if "path" in event]
        return {**result, "seconds_to_take_over": round(min(later), 3) if later else None}


def unlocked_round(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="two-savers-") as name:
        folder = Path(name)
        jobs = [start(folder, job, locked=False) for job in (0, 1)]
        wait_for_events(folder, [0, 1])
        time.sleep(seconds)
        for job in jobs:
            kill(job)
        return judge(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--out", type=Path, help="a folder for the result, instead of results/")
    arguments = parser.parse_args()
    result = {
        "seconds": arguments.seconds,
        "workers": WORKERS,
        "locked": locked_round(arguments.seconds),
        "unlocked": unlocked_round(arguments.seconds),
    }
    save("two_savers", result, **({"folder": arguments.out} if arguments.out else {}))
    bad = 0
    for name in ("locked", "unlocked"):
        row = result[name]
        bad += row["broken"] + row["mixed"] + row["lost"]
        print(f"{name}: " + ", ".join(f"{row[key]} {key}" for key in KEYS))
    print(f"broken, mixed or lost: {bad}")


KEYS = ("committed", "broken", "mixed", "lost", "refused")

if __name__ == "__main__":
    main()

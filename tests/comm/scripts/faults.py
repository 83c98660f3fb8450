"""faults.py TRANSPORT FOLDER…: three ranks in every collective, until somebody strikes rank 1.

Each case has a group of its own, and a thread on every rank that calls its collective over and
over. So one signal hits all of them, each wherever it just is. For every folder there is such a
world, which talks to the test by files in it:

    ready-<rank>.json     all cases run; the process id
    struck                made by the test when it has sent its signal
    errors-<rank>.json    by case: what was raised, when, and what is raised after that; and
                          what becomes of a new subgroup
    go                    made by the test when it has seen enough
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from worlds import run_world

from farandole.comm import Group
from farandole.errors import CommError

VICTIM = 1
TIMEOUT = timedelta(seconds=30)
PATIENCE_SECONDS = 300.0


def whole(group: Group) -> torch.Tensor:
    return torch.ones(999)


def pass_on(group: Group) -> None:
    if group.rank == VICTIM:
        for peer in (0, 2):
            group.send(whole(group), peer)
    else:
        group.receive(whole(group), VICTIM)


CASES: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: group.all_reduce(whole(group), algorithm="native"),
    "all_reduce by ring": lambda group: group.all_reduce(whole(group), algorithm="ring"),
    "all_reduce by tree": lambda group: group.all_reduce(whole(group), algorithm="double_tree"),
    "all_reduce of much": lambda group: group.all_reduce(torch.ones(1_400_003)),
    "all_reduce started": lambda group: group.start(group.all_reduce, whole(group)).wait(),
    "reduce_scatter": lambda group: group.reduce_scatter(whole(group)),
    "all_gather": lambda group: group.all_gather(whole(group)),
    "all_to_all": lambda group: group.all_to_all([whole(group)] * 3),
    "broadcast": lambda group: group.broadcast(whole(group), source=0),
    "broadcast of the lost": lambda group: group.broadcast(whole(group), source=VICTIM),
    "barrier": lambda group: group.barrier(),
    "receive": pass_on,
}


def repeat(group: Group, case: str, turns: dict[str, int], errors: dict[str, Any]) -> None:
    try:
        while True:
            CASES[case](group)
            turns[case] += 1
            time.sleep(0.5)
    except CommError as error:
        errors[case] = {"error": str(error), "at": time.monotonic()}
    try:
        CASES[case](group)
    except CommError as error:
        errors[case]["after"] = str(error)


def divide(group: Group, errors: dict[str, Any]) -> None:
    """Not at the moment of the signal, but when one is lost already."""
    wait_for(Path("struck").exists)
    try:
        group.subgroup([0, 1, 2])
    except CommError as error:
        errors["subgroup"] = {"error": str(error), "at": time.monotonic()}


def body(group: Group) -> None:
    groups = {case: group.subgroup([0, 1, 2]) for case in CASES}
    turns, errors = dict.fromkeys(CASES, 0), dict[str, Any]()
    threads = [
        threading.Thread(target=repeat, args=(groups[case], case, turns, errors), daemon=True)
        for case in CASES
    ]
    threads.append(threading.Thread(target=divide, args=(group, errors), daemon=True))
    for thread in threads:
        thread.start()
    wait_for(lambda: min(turns.values()) >= 2 or bool(errors))
    write(f"ready-{group.rank}.json", {"pid": os.getpid()})
    wait_for(lambda: not any(thread.is_alive() for thread in threads))
    write(f"errors-{group.rank}.json", errors)
    wait_for(Path("go").exists)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def write(name: str, content: Any) -> None:
    """So that whoever sees the file sees all of it."""
    Path(f"{name}.part").write_text(json.dumps(content))
    Path(f"{name}.part").rename(name)


if __name__ == "__main__":
    transport, *folders = sys.argv[1:]
    for folder in folders[1:]:
        if not os.fork():
            folders = [folder]
            break
    os.chdir(folders[0])
    run_world(transport, 3, TIMEOUT, body)
    if len(folders) > 1:
        os.wait()

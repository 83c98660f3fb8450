"""Real processes over shared memory: many operations, many lives, and deaths."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

MIX = Path(__file__).parent / "scripts" / "mix.py"


def ranks_of(size: int, port: str) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(size)]


def spans_in(file: Path) -> list[dict[str, Any]]:
    """Of a timeline, which must be valid."""
    events = json.loads(file.read_text())
    found = events["traceEvents"] if isinstance(events, dict) else events
    return [event for event in found if event.get("ph") in ("X", "B")]


@pytest.mark.parametrize("size", [2, 4])
def test_most_of_what_there_is(sandbox: Sandbox, free_port: str, size: int) -> None:
    ranks = [
        variables | {"HOROVOD_TIMELINE": "whole.json"} if size == 2 else variables
        for variables in ranks_of(size, free_port)
    ]
    arguments = ["own.json"] if size == 4 else []
    for rank, end in enumerate(sandbox.by_hand(ranks, MIX, *arguments)):
        assert end.returncode == 0, end.stderr
        assert end.stdout.split() == ["rank", str(rank), "of", str(size)]
    file = sandbox.folder / ("whole.json" if size == 2 else "own.json")
    spans = spans_in(file)
    assert {span["pid"] for span in spans} == set(range(size))
    names = {span["name"] for span in spans}
    if size == 2:
        assert any("gradient.left.weight" in name for name in names)
    else:
        assert any("seen" in name for name in names)
        assert any("CYCLE" in name for name in names)
        assert not any("gradient" in name for name in names)  # that was before
    assert [path.name for path in sandbox.folder.iterdir()] == [file.name]  # no parts are left


LIVES = """
import gc, os, threading
import psutil, torch
import farandole.horovod.torch as hvd

def held():
    gc.collect()
    return psutil.Process().num_fds(), threading.active_count(), len(os.listdir("/proc/self/task"))

for life in range(200):
    hvd.init()
    assert hvd.size() == 2
    total = hvd.allreduce(torch.full((3,), float(life)), name="x", op=hvd.Sum)
    assert total.tolist() == [2.0 * life] * 3
    if life % 50 == 49:
        some = hvd.add_process_set([0])
        if some.included():
            hvd.allreduce(torch.ones(100_000), process_set=some)
    large = hvd.grouped_allreduce([torch.ones(200_000), torch.ones(3)]) if life % 50 == 0 else []
    hvd.shutdown()
    if life == 60:
        before = held()
    if life == 199:
        after = held()
assert all(a <= b for a, b in zip(after, before)), (before, after)
assert not hvd.is_initialized()
print("lived")
"""


def test_two_hundred_lives(sandbox: Sandbox, two_ranks: list[dict[str, str]]) -> None:
    for end in sandbox.by_hand(two_ranks, sandbox.script("lives.py", LIVES)):
        assert end.returncode == 0, end.stderr
        assert end.stdout == "lived\n"


DEATHS = """
import os, signal, sys, time
import torch
import farandole.horovod.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 1:
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("no such key")
began = time.monotonic()
for _ in range(2):
    try:
        hvd.allreduce(torch.ones(3), name="x")
    except hvd.HorovodInternalError as error:
        print(error)
hvd.shutdown()
print(time.monotonic() - began < 30.0)  # not the 120 s for which a silent rank is waited for
"""


@pytest.mark.parametrize(("end", "why"), [("killed", "rank 1 has ended"), ("raised", "rank 1 has")])
def test_a_rank_that_dies_is_named_by_the_others(
    sandbox: Sandbox, free_port: str, end: str, why: str
) -> None:
    script = sandbox.script("deaths.py", DEATHS)
    ranks = ranks_of(3, free_port)
    if end == "raised":  # over sockets, for once
        ranks = [variables | {"FARANDOLE_TRANSPORT": "c10d"} for variables in ranks]
    ends = sandbox.by_hand(ranks, script, end)
    assert [done.returncode for done in ends] == [0, -9 if end == "killed" else 1, 0], ends
    for rank in (0, 2):
        first, second, soon = ends[rank].stdout.splitlines()
        assert why in first
        assert why in second
        assert "Call hvd.shutdown() and hvd.init() to form a new one." in second
        assert soon == "True"
        assert "Traceback" not in ends[rank].stderr


FORKED = """
import os, subprocess, sys
import torch
import farandole.horovod.torch as hvd

hvd.init()
if __name__ == "__main__":
    child = os.fork()
    if not child:
        try:
            print(hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1)))
        except hvd.HorovodInternalError as error:
            print(error)
        raise SystemExit(0)
    os.waitpid(child, 0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2.0
    again = f"import runpy; runpy.run_path({__file__!r}, run_name='__mp_main__')"
    spawned = subprocess.run([sys.executable, "-c", again])  # as multiprocessing does it
    assert spawned.returncode == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2.0
"""


def test_processes_that_a_rank_starts_have_no_rank(
    sandbox: Sandbox, two_ranks: list[dict[str, str]]
) -> None:
    for rank, end in enumerate(sandbox.by_hand(two_ranks, sandbox.script("forked.py", FORKED))):
        assert end.returncode == 0, end.stderr
        assert "which was forked off: a DataLoader's worker, say." in end.stdout
        assert f"has this rank ({rank})" in end.stderr
        assert "if __name__ == '__main__'" in end.stderr


MPI = """
import torch
import farandole.horovod.torch as hvd

hvd.init()
assert hvd.mpi_enabled()
assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (hvd.rank(), 2, 1)
for turn in range(3):  # over again
    order = ["a", "b"] if hvd.rank() else ["b", "a"]
    handles = {name: hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum) for name in order}
    assert all(hvd.synchronize(handles[name]).tolist() == [2.0] * 3 for name in "ab")
    hvd.shutdown()
    hvd.init()
print("rank", hvd.rank(), "of", hvd.size())
"""


@pytest.mark.mpi
def test_mpirun(sandbox: Sandbox, mpirun: list[str]) -> None:
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, sandbox.script("mpi.py", MPI)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert list((sandbox.temporary / f"farandole-{os.getuid()}").iterdir()) == []


HEARD = """
import sys, time
from pathlib import Path
import torch
import farandole.horovod.torch as hvd
from farandole.horovod import engine
from farandole.horovod.session import current

def until(condition):
    while not condition():
        time.sleep(0.01)

how, wait = sys.argv[1:]
hvd.init()
rank, some = hvd.rank(), hvd.add_process_set([1, 2])
waits = {"join": hvd.join, "barrier": hvd.barrier, "set": lambda: hvd.barrier(some)}
driving = current().engine(hvd.global_process_set)._driving
if rank == 0:
    if how == "unnoticed":  # its thread is in a round, to which rank 1 does not come in time
        until(Path("busy").exists)
        until(driving.locked)
        engine._LEAVING_SECONDS = 0.2
    hvd.shutdown()
    Path("left").touch()
elif rank == 1:
    if how == "unnoticed":
        with driving:
            Path("busy").touch()
            until(Path("left").exists)
    try:
        waits[wait]()
    except hvd.HorovodInternalError as error:
        print(error)
    Path("heard").touch()
else:
    until(Path("heard").exists)
hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 3.0
"""


@pytest.mark.parametrize(
    ("how", "wait"),
    [("told", "join"), ("told", "barrier"), ("told", "set"), ("unnoticed", "join")],
)
def test_a_rank_that_waits_hears_of_one_that_has_left_and_begun_anew(
    sandbox: Sandbox, free_port: str, how: str, wait: str
) -> None:
    """In seconds, not after the time for which a silent rank is waited for: here it is endless."""
    endless = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
    ranks = [variables | endless for variables in ranks_of(3, free_port)]
    ends = sandbox.by_hand(ranks, sandbox.script("heard.py", HEARD), how, wait)
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    left = "rank 0 has called hvd.shutdown()" if how == "told" else "rank 0 has left"
    assert left in ends[1].stdout


AGAIN = """
import os
import time
from pathlib import Path
import torch
import farandole.horovod.torch as hvd
from farandole.errors import JoinError

hvd.init()
rank = hvd.rank()
hvd.shutdown()
if rank == 0:
    patience = os.environ.pop("HOROVOD_GLOO_TIMEOUT_SECONDS")
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "1"
    for _ in range(2):
        try:
            hvd.init()
        except JoinError as error:
            print(error)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = patience
    Path("gave up").touch()
else:
    while not Path("gave up").exists():
        time.sleep(0.01)
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2.0
"""


def test_a_rank_that_gave_up_meets_the_others_the_next_time(
    sandbox: Sandbox, two_ranks: list[dict[str, str]]
) -> None:
    ranks = [variables | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "150"} for variables in two_ranks]
    first, second = sandbox.by_hand(ranks, sandbox.script("again.py", AGAIN))
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr, second.stderr)
    assert first.stdout.count("waited 1 s for rank(s) [1] of 2 to call hvd.init()") == 2


BARRIERS = """
import json, random, time
import farandole.horovod.torch as hvd

hvd.init()
rank, some = hvd.rank(), hvd.add_process_set([0, 2])
pauses = random.Random(rank)
seen = []
for turn in range(60):
    whose = some if turn % 3 == 2 else hvd.global_process_set
    if not whose.included():
        continue
    time.sleep(pauses.choice([0.0, 0.0, 0.001, 0.01, 0.05]))
    came = time.monotonic_ns()  # one clock for all processes of a host
    hvd.barrier(whose)
    seen.append([turn, came, time.monotonic_ns()])
print(json.dumps(seen))
"""


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_nobody_passes_a_barrier_before_the_last_one_has_come(
    sandbox: Sandbox, free_port: str, transport: str
) -> None:
    """By the order of what happened, whoever is how late."""
    ranks = [variables | {"FARANDOLE_TRANSPORT": transport} for variables in ranks_of(3, free_port)]
    ends = sandbox.by_hand(ranks, sandbox.script("barriers.py", BARRIERS))
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    turns: dict[int, list[tuple[int, int]]] = {}
    for end in ends:
        for turn, came, passed in json.loads(end.stdout):
            turns.setdefault(turn, []).append((came, passed))
    assert sorted(map(len, turns.values())) == [2] * 20 + [3] * 40
    for times in turns.values():
        assert max(came for came, _ in times) <= min(passed for _, passed in times)

"""`fd.current`: the run inside functions; in each thread of an in-process world its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import farandole as fd
from farandole.testing import run_world
from farandole.train import Run

SCRIPT = """
import os, threading
import farandole as fd

try:
    fd.current()
except fd.UserError as error:
    assert "call fd.init()" in str(error), error
else:
    raise AssertionError("there was a run before fd.init")

run = fd.init()

def rank_of_helper():
    return fd.current().rank

assert fd.current() is run
seen = []
thread = threading.Thread(target=lambda: seen.append(rank_of_helper()))
thread.start()
thread.join()
assert seen == [run.rank]

child = os.fork()
if child == 0:
    try:
        fd.current()
    except fd.UserError as error:
        os._exit(0 if "is none itself" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
print("current")
"""


def test_the_run_of_a_process(sandbox) -> None:
    done = sandbox.fork(sandbox.script("current.py", SCRIPT))
    assert done.returncode == 0, done.stderr
    assert "current" in done.stdout


def helper() -> int:
    return fd.current().rank


def test_each_rank_of_a_world_has_its_own(tmp_path: Path) -> None:
    meeting = threading.Barrier(4)

    def body(run: Run) -> tuple[bool, int]:
        meeting.wait(timeout=30)  # all four are there at once
        return fd.current() is run, helper()

    assert run_world(4, body, folder=tmp_path) == [(True, rank) for rank in range(4)]


def test_a_world_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.train.current_run._RUNS.of_process", None)

    def body(run: Run) -> None:
        assert fd.current() is run

    run_world(2, body, folder=tmp_path)
    with pytest.raises(fd.UserError, match=r"call fd\.init\(\)"):
        fd.current()

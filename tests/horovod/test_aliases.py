"""`import horovod` is ours: one state under both names, in every process, without a change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox

SPAWNED = """
import importlib

def same(*names):
    for name in names:
        theirs = importlib.import_module(f"horovod.{name}")
        ours = importlib.import_module(f"farandole.horovod.{name}")
        assert theirs is ours, name
        assert ours.__spec__.name == ours.__name__ == f"farandole.horovod.{name}", ours.__spec__
    import horovod, farandole.horovod
    assert horovod is farandole.horovod
    return horovod.__version__
"""
SCRIPT = """
import multiprocessing, sys
from spawned import same

def train():
    import horovod.torch as hvd
    import farandole.horovod.torch as ours

    assert hvd is ours
    hvd.init()
    assert (ours.rank(), ours.size()) == (0, 1)
    names = ("elastic", "mpi_ops", "compression")
    inner = ("common.process_sets", "common.util", "runner.util.threads")
    print(same("runner", *inner, *(f"torch.{name}" for name in names)))
    import horovod
    assert horovod.torch.mpi_ops is sys.modules["farandole.horovod.torch.mpi_ops"]
    assert horovod.run is horovod.runner.run
    for name in ("tensorflow", "spark", "nonsense"):
        try:
            __import__(f"horovod.{name}")
        except ImportError as error:
            print(type(error).__name__, error)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(same, ["common.exceptions"]))
    train()
"""
FOREIGN = """
import horovod.torch
from farandole.horovod import aliases
try:
    aliases.install()
except ValueError as error:
    print(error)
"""
INSTALL = """
from farandole.horovod import aliases
aliases.install()
aliases.install()
import horovod.torch as hvd, sys
print(hvd.__name__, len([f for f in sys.meta_path if type(f).__module__ == aliases.__name__]))
"""


def test_every_name_is_the_same_module_also_in_processes_that_are_spawned(sandbox: Sandbox) -> None:
    sandbox.script("spawned.py", SPAWNED)
    script = sandbox.script("train.py", SCRIPT)
    (sandbox.folder / "site" / "horovod").mkdir(parents=True)  # an installed Horovod
    sandbox.script("site/horovod/__init__.py", "raise RuntimeError('theirs')")
    path = f"{sandbox.environment['PYTHONPATH']}:{sandbox.folder / 'site'}"
    done = sandbox.farandole("run", "--horovod", script, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert lines[:2] == ["0.28.1", "0.28.1"]
    needed = "ModuleNotFoundError horovod.tensorflow needs TensorFlow"
    assert lines[2].startswith(needed), lines[2]
    assert "pip install 'farandole[tensorflow]'" in lines[2]
    assert "farandole horovodrun" in lines[3]
    assert lines[4].startswith("ModuleNotFoundError horovod.nonsense is not here. Farandole has")


def test_by_hand_and_not_beside_another_one(sandbox: Sandbox) -> None:
    done = sandbox.fork(sandbox.script("install.py", INSTALL))
    assert (done.stdout, done.stderr) == ("farandole.horovod.torch 1\n", "")
    (sandbox.folder / "horovod").mkdir()
    sandbox.script("horovod/__init__.py", "")
    sandbox.script("horovod/torch.py", "")
    done = sandbox.fork(sandbox.script("foreign.py", FOREIGN))
    assert "another Horovod is imported already (horovod.torch)" in done.stdout


def test_a_python_without_farandole_is_named(sandbox: Sandbox) -> None:
    from farandole.horovod.aliases import shim_variables

    folder = shim_variables({})["PYTHONPATH"]
    bare = [sys.executable, "-S", "-c", "import sys; sys.path.pop(0); import horovod"]
    done = sandbox.run(bare, PYTHONPATH=folder)
    assert "has no farandole. Install it there" in done.stderr

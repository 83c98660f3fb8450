"""A worker does not outlive its launcher, and knows it from other parents."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from farandole.environment import LAUNCHER
from farandole.system.orphans import tied_to_this_process

if TYPE_CHECKING:
    from conftest import Sandbox

WORKER = """
import os, time
from pathlib import Path
from farandole.system.orphans import end_with_launcher

end_with_launcher(os.environ)
Path("half").write_text(str(os.getpid()))
Path("half").rename("pid")
while not Path("go").exists():
    time.sleep(0.01)
"""


def test_the_kernel_ends_a_worker_whose_parent_is_killed(sandbox: Sandbox) -> None:
    worker = sandbox.script("worker.py", WORKER)
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(worker)!r}])"
    launcher = sandbox.start([sys.executable, "-c", program])
    sandbox.wait_until((sandbox.folder / "pid").exists, "the worker runs")
    launcher.kill()
    launcher.communicate()
    sandbox.wait_until_gone()


def test_a_worker_that_comes_too_late_leaves(sandbox: Sandbox) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = sandbox.python(sandbox.script("worker.py", WORKER), **{LAUNCHER: str(gone.pid)})
    assert done.returncode == 1
    assert done.stderr == "the launcher of this worker is gone\n"


def test_a_launcher_that_nobody_has_reaped_is_gone_too(sandbox: Sandbox) -> None:
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    done = sandbox.python(sandbox.script("worker.py", WORKER), **{LAUNCHER: str(zombie.pid)})
    zombie.wait()
    assert done.stderr == "the launcher of this worker is gone\n"


def test_a_child_whose_parent_is_gone_before_it_asks(sandbox: Sandbox) -> None:
    tie = tied_to_this_process()
    ours, theirs = os.pipe()
    if not os.fork():  # its child has another parent than the one that it was to be tied to
        if not os.fork():
            tie()
            os.write(theirs, b"it runs on")
        os._exit(0)
    os.wait()
    os.close(theirs)
    assert os.read(ours, 100) == b""
    os.close(ours)


def test_a_launcher_need_not_be_the_parent(sandbox: Sandbox) -> None:
    # As when the script is a wrapper that starts the one that joins.
    (sandbox.folder / "go").touch()
    done = sandbox.python(sandbox.script("worker.py", WORKER), **{LAUNCHER: str(os.getppid())})
    assert done.returncode == 0, done.stderr

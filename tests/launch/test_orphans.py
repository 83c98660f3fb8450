"""A worker does not outlive its launcher, and knows it from other parents."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from farandole.orphans import LAUNCHER

if TYPE_CHECKING:
    from conftest import Sandbox

WORKER = """
import os, time
from pathlib import Path
from farandole.orphans import end_with_launcher

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


def test_a_launcher_need_not_be_the_parent(sandbox: Sandbox) -> None:
    # As when the script is a wrapper that starts the one that joins.
    (sandbox.folder / "go").touch()
    done = sandbox.python(sandbox.script("worker.py", WORKER), **{LAUNCHER: str(os.getppid())})
    assert done.returncode == 0, done.stderr

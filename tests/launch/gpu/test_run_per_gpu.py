"""`farandole run --per-gpu K`: from the command line to workers, and what is left after them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

    from tests.support.gpu_machine import GpuMachine

SHOW = """
import os
names = ("LOCAL_RANK", "WORLD_SIZE", "FARANDOLE_PER_GPU", "CUDA_VISIBLE_DEVICES")
assert os.path.exists(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
print(*(os.environ[name] for name in names), flush=True)
"""
WAIT = """
import os, time
from pathlib import Path

Path(f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


def start(sandbox: Sandbox, machine: GpuMachine, *words: str) -> subprocess.Popen[str]:
    """Two workers on one of the GPUs, until they run."""
    script = sandbox.script("wait.py", WAIT)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0"}
    launcher = sandbox.start_farandole("run", "--per-gpu", "2", *words, script, **variables)
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    sandbox.wait_until(
        lambda: launcher.poll() is not None or all(path.exists() for path in ready), "workers run"
    )
    assert launcher.poll() is None, launcher.communicate()
    return launcher


def daemons(sandbox: Sandbox) -> list[psutil.Process]:
    """The control daemon of MPS and its server."""
    found = []
    for process in sandbox.processes():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            variables = process.environ()
            if "CUDA_MPS_PIPE_DIRECTORY" in variables and "RANK" not in variables:
                found.append(process)
    return found


def assert_nothing_is_left(sandbox: Sandbox) -> None:
    sandbox.wait_until_gone()
    assert list(sandbox.temporary.glob("farandole-mps-*")) == []


def test_workers_of_every_gpu(sandbox: Sandbox, machine: GpuMachine) -> None:
    script = sandbox.script("show.py", SHOW)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "1,0"}
    done = sandbox.farandole("run", "--per-gpu", "2", "-n", "4", script, **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} 4 2 GPU-1000-aaaa,GPU-0000-aaaa" for rank in range(4)
    ]
    assert_nothing_is_left(sandbox)


def test_a_launcher_that_is_killed(sandbox: Sandbox, machine: GpuMachine) -> None:
    launcher = start(sandbox, machine)
    assert len(daemons(sandbox)) == 2
    launcher.kill()
    launcher.communicate()
    assert_nothing_is_left(sandbox)


def test_a_launcher_that_is_stopped(sandbox: Sandbox, machine: GpuMachine) -> None:
    launcher = start(sandbox, machine)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; no worker is left" in said
    assert_nothing_is_left(sandbox)


def test_a_daemon_that_is_killed(sandbox: Sandbox, machine: GpuMachine) -> None:
    launcher = start(sandbox, machine)
    (control,) = [each for each in daemons(sandbox) if each.name() != "sleep"]
    control.kill()
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 1
    assert f"nvidia-cuda-mps-control, process {control.pid}) has ended (signal 9)" in said
    assert "Start the job again" in said
    assert_nothing_is_left(sandbox)


def test_a_daemon_that_is_killed_is_followed_by_another(
    sandbox: Sandbox, machine: GpuMachine
) -> None:
    launcher = start(sandbox, machine, "--restarts", "1")
    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    for path in ready:
        path.unlink()
    (control,) = [each for each in daemons(sandbox) if each.name() != "sleep"]
    control.kill()
    sandbox.wait_until(
        lambda: launcher.poll() is not None or all(path.exists() for path in ready),
        "they run again",
    )
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    assert f"nvidia-cuda-mps-control, process {control.pid}) has ended (signal 9)" in said
    assert "all 2 workers start again (1 of 1 restarts), from the beginning" in said
    assert "Start the job again" not in said
    assert_nothing_is_left(sandbox)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_daemon_starts(
    sandbox: Sandbox, machine: GpuMachine, number: signal.Signals
) -> None:
    script = sandbox.script("wait.py", WAIT)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0", "STAND_IN_MPS": "silent"}
    launcher = sandbox.start_farandole("run", "--per-gpu", "2", script, **variables)
    sandbox.wait_until(lambda: bool(daemons(sandbox)), "the daemon starts")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 128 + number, said
    assert f"stopped by {number.name}; no worker is left" in said
    assert_nothing_is_left(sandbox)


def test_a_worker_that_is_killed(sandbox: Sandbox, machine: GpuMachine) -> None:
    launcher = start(sandbox, machine)
    os.kill(int((sandbox.folder / "ready-1").read_text()), signal.SIGKILL)
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; the other was stopped" in said
    assert_nothing_is_left(sandbox)


def test_all_start_again_when_one_is_lost(sandbox: Sandbox, machine: GpuMachine) -> None:
    launcher = start(sandbox, machine, "--restarts", "1")
    first = {process.pid for process in daemons(sandbox)}
    ready = sandbox.folder / "ready-1"
    pid = int(ready.read_text())
    ready.unlink()
    os.kill(pid, signal.SIGKILL)
    sandbox.wait_until(ready.exists, "they run again")
    second = {process.pid for process in daemons(sandbox)}
    assert len(second) == 2
    assert not first & second, "with a daemon of their own"
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=400)
    assert "--per-gpu 2 says which worker shares a GPU with which" in said
    assert_nothing_is_left(sandbox)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--per-gpu", "0"], "--per-gpu 0: give a number of workers a GPU"),
        (["--per-gpu", "2", "-H", "a:2,b:2"], "--per-gpu 2 and hosts (a:2,b:2)"),
        (["--per-gpu", "2", "--min", "1"], "--min and --per-gpu 2"),
        (["--per-gpu", "2", "--max", "4"], "--max and --per-gpu 2"),
        (["--per-gpu", "2", "--horovod"], "hvd.local_rank(), which counts workers and not GPUs"),
        (["--per-gpu", "2", "--on", "slurm"], "--per-gpu 2 under --on slurm"),
        (["--per-gpu", "2", "--on", "mpi"], "--per-gpu 2 under --on mpi"),
        (["--per-gpu", "auto", "-n", "4"], "-n 4 and --per-gpu auto"),
        (
            ["--per-gpu", "auto", "--servers", "tcp://127.0.0.1:1"],
            "--per-gpu auto and --servers tcp://127.0.0.1:1",
        ),
        (["--per-gpu", "2", "--gpu-threads", "0"], "--gpu-threads 0: give the percentage"),
        (["--per-gpu", "2", "--gpu-threads", "101"], "--gpu-threads 101: give the percentage"),
        (["--gpu-threads", "50"], "--gpu-threads 50 is for workers that share a GPU"),
        (["--per-gpu", "1", "--gpu-threads", "50"], "--gpu-threads 50 and --per-gpu 1"),
        (["--per-gpu", "2", "-n", "3"], "2 workers on each of 2 GPU(s) make 4"),
    ],
)
def test_what_does_not_go_with_it(
    here: GpuMachine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    from farandole.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["farandole", "run", *words, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_nodes_of_an_allocation_are_not_left_out_silently(
    here: GpuMachine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from farandole.cli import main

    (tmp_path / "nodes").write_text("localhost\nnode2\n")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("PBS_JOBID", "1")
    monkeypatch.setattr("sys.argv", ["farandole", "run", "--per-gpu", "2", "train.py"])
    with pytest.raises(SystemExit):
        main()
    assert "in an allocation with other hosts (node2)" in capsys.readouterr().err


def test_a_job_inside_of_a_worker_has_a_count_of_its_own(
    sandbox: Sandbox, machine: GpuMachine
) -> None:
    script = sandbox.script("show.py", "import os; print(os.environ.get('FARANDOLE_PER_GPU'))")
    inherited = machine.variables | {"FARANDOLE_PER_GPU": "2", "CUDA_VISIBLE_DEVICES": "0"}
    done = sandbox.farandole("run", "-n", "1", script, **inherited)
    assert (done.stdout, done.returncode) == ("[0] None\n", 0), done.stderr
    done = sandbox.farandole("run", "--per-gpu", "1", script, **inherited)
    assert (done.stdout, done.returncode) == ("[0] 1\n", 0), done.stderr


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # so that an import fails
from farandole.cli import main
sys.argv = ["farandole", "run", "--per-gpu", "2", "--restarts", "1", sys.argv[1]]
main()
"""


@pytest.mark.fresh
def test_the_launcher_needs_no_torch(sandbox: Sandbox, machine: GpuMachine) -> None:
    script = sandbox.script("hello.py", "print('hello')")
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "1"}
    done = sandbox.python(sandbox.script("launcher.py", WITHOUT_TORCH), script, **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"]

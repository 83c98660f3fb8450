"""`farandole run --per-gpu auto`: trials, their table, and the job that follows."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from farandole.launch.gpu.trial_table import Trial, table
from farandole.worker.trial.record import ThroughputRecord
from tests.support.gpu_machine import gpu

if TYPE_CHECKING:
    from conftest import Sandbox

    from tests.support.gpu_machine import GpuMachine

# Too large for four workers.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch, farandole as fd

run = fd.init(name="mine", checkpoints="every=1steps")
trial = "FARANDOLE_GPU_TRIAL" in os.environ
if run.rank == 0:
    with Path("starts").open("a") as file:
        print(run.size, trial, run.folder, sys.argv[1:], file=file)
if run.size == 4:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
model = torch.nn.Linear(2, 1)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for epoch in run.epochs(10_000 if trial else 1):
    for (x,) in run.loader(data, global_batch_size=4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02 if trial else 0)
"""


def test_the_fastest_that_fits(sandbox: Sandbox, machine: GpuMachine) -> None:
    machine.has(gpu(0))
    script = sandbox.script("train.py", TRAIN)
    words = ("run", "--per-gpu", "auto", "--gpu-threads", "50", "--seed", "3", script, "--lr", "1")
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0"}
    done = sandbox.farandole(*words, **variables)
    assert done.returncode == 0, done.stderr
    starts = (sandbox.folder / "starts").read_text().splitlines()
    rows = [line.split() for line in done.stderr.splitlines() if line.startswith("  ")]
    fastest = max(rows[1:3], key=lambda row: float(row[1].replace(",", "")))[0]
    assert [line.split()[0] for line in starts] == ["1", "2", "4", fastest]
    assert [line.split()[1] for line in starts] == ["True", "True", "True", "False"]
    assert all(line.endswith("['--lr', '1']") for line in starts)
    assert starts[3].split()[2] == "runs/mine"
    saved = [path.name for path in (sandbox.folder / "runs").iterdir()]
    assert saved == ["mine"], "trials leave nothing there"
    assert [row[0] for row in rows[1:]] == ["1", "2", "4", "8"]
    assert rows[1][2:] == ["4", "37", "%", "2.0", "of", "140.4", "GiB"]
    assert " ".join(rows[3][1:]) == "- - - - out of memory"
    assert "not tried" in " ".join(rows[4])
    assert f"{fastest} worker(s) a GPU are the fastest" in done.stderr
    assert list(sandbox.temporary.iterdir()) == [], "nor here"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("", "the script never called fd.init()"),
        ("import farandole as fd; fd.init()", "no training batch came from run.loader"),
        (
            "import farandole as fd, torch; run = fd.init()\n"
            "for _ in run.loader(torch.utils.data.TensorDataset(torch.zeros(6)), 2): pass",
            "the script ended after 3 training step(s), and the first 10 are warm-up",
        ),
        (
            "import sys; sys.exit('no such data')",
            "no such data\nMend that, and start the job again",
        ),
    ],
)
def test_a_script_that_cannot_be_measured(
    sandbox: Sandbox, machine: GpuMachine, script: str, message: str
) -> None:
    machine.has(gpu(0))
    path = sandbox.script("train.py", script)
    done = sandbox.farandole(
        "run", "--per-gpu", "auto", path, **machine.variables, CUDA_VISIBLE_DEVICES="0"
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "farandole-trial-" not in done.stderr, "that folder is removed"
    assert "--per-gpu " in done.stderr.splitlines()[-1], "what to do instead"


# What some number of workers does. The number is how many there are.
FAILS = """
import os, sys, time
import torch, farandole as fd

run = fd.init()
trial = "FARANDOLE_GPU_TRIAL" in os.environ
number, what = int(sys.argv[1]), sys.argv[2]
if run.size == number and what == "waits" and trial:
    open("waits", "w").close()
    time.sleep(600)
if run.size == number and what == "raises":
    raise ValueError("the batch is too small")
if run.size == number and what == "lacks memory":
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
ends = not trial or (run.size == number and what == "ends")
data = torch.utils.data.TensorDataset(torch.zeros(64, 2))
model = torch.nn.Linear(2, 1)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for epoch in run.epochs(1 if ends else 10_000):
    for (x,) in run.loader(data, batch_size=16):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0 if ends else 0.02)
print("trained by", run.size)
"""


def rows_of(said: str) -> list[list[str]]:
    """Of the table, by columns that are never empty: the number, samples/s and the problem."""
    lines = [line.split(maxsplit=2) for line in said.splitlines() if line.startswith("  ")]
    return [[number, rate, rest.removeprefix("-  ")] for number, rate, rest in lines[1:]]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "ValueError: the batch is too small"),
        ("lacks memory", "out of memory"),
        ("ends", "the script ended before it was measured"),
    ],
)
def test_a_number_that_fails_leaves_what_was_measured(
    sandbox: Sandbox, machine: GpuMachine, what: str, said: str
) -> None:
    machine.has(gpu(0))
    script = sandbox.script("train.py", FAILS)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0"}
    done = sandbox.farandole("run", "--per-gpu", "auto", script, "2", what, **variables)
    rows = rows_of(done.stderr)
    assert rows[0][1] != "-", done.stderr
    assert rows[1][1] == "-"
    assert rows[1][2].endswith(said)
    assert [row[2].split("  ")[-1] for row in rows[2:]] == ["not tried, after 2 failed"] * 2
    assert "1 worker(s) a GPU are the fastest" in done.stderr
    assert "trained by 1" in done.stdout
    assert done.returncode == 0, done.stderr


def test_a_daemon_that_is_no_good_leaves_one_worker(sandbox: Sandbox, machine: GpuMachine) -> None:
    machine.has(gpu(0))
    script = sandbox.script("train.py", FAILS)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0", "STAND_IN_MPS": "broken"}
    words = ("run", "--per-gpu", "auto", script, "0", "nothing")
    done = sandbox.farandole(*words, **variables)
    assert done.returncode == 0, done.stderr
    assert "has ended (exit code 1), before it answered" in rows_of(done.stderr)[1][2]
    assert "1 worker(s) a GPU are the fastest" in done.stderr


def test_a_stop_when_something_was_measured(sandbox: Sandbox, machine: GpuMachine) -> None:
    machine.has(gpu(0))
    script = sandbox.script("train.py", FAILS)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0"}
    words = ("run", "--per-gpu", "auto", script, "2", "waits")
    launcher = sandbox.start_farandole(*words, **variables)
    sandbox.wait_until((sandbox.folder / "waits").exists, "the second trial runs")
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT; no worker is left" in said
    assert "the fastest" not in said
    sandbox.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stop_in_the_middle(sandbox: Sandbox, machine: GpuMachine, number: int) -> None:
    machine.has(gpu(0))
    waits = "from pathlib import Path\nimport time\nPath('ready').touch()\ntime.sleep(600)"
    script = sandbox.script("train.py", waits)
    words = ("run", "--per-gpu", "auto", script)
    variables = machine.variables | {"CUDA_VISIBLE_DEVICES": "0"}
    launcher = sandbox.start_farandole(*words, **variables)
    sandbox.wait_until((sandbox.folder / "ready").exists, "the trial runs")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=400)
    if number == signal.SIGINT:
        assert launcher.returncode == 128 + signal.SIGINT
        assert "stopped by SIGINT; no worker is left" in said
    sandbox.wait_until_gone()
    assert list(sandbox.temporary.glob("farandole-*")) == []


def test_figures_that_are_not_known() -> None:
    record = ThroughputRecord(10, 20, 640, 2.0, is_enough=True)
    shown = table([Trial(1, record), Trial(2, record, None, 1024.0), Trial(4, problem="failed")])
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["1", "320.0", "32", "-", "-"],
        ["2", "320.0", "32", "-", "1.0", "GiB"],
        ["4", "-", "-", "-", "-", "failed"],
    ]

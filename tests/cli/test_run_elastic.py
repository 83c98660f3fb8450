"""What `farandole run --min` refuses: before the start, or in the first lines of the script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from farandole.cli import commands
from farandole.cli.job.restarting import why_all_restart

LOOP = """
import torch, farandole as fd
run = fd.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "--min", "3"], "--min 3: the job begins with 2, and would wait"),
        (["-n", "4", "--min", "0"], "--min 0: a job needs at least 1 worker"),
        (["-n", "4", "--max", "3", "--min", "1"], "--max 3: the job begins with 4"),
        (["-n", "2", "--max", "0", "--min", "1"], "--max 0: the job begins with 2"),
        (["--min", "1", "--restarts", "-1"], "--restarts -1"),
        (["--min", "1", "--replace-stragglers"], "--restarts how many may be replaced"),
        (["--min", "1", "--elastic-wait", "0"], "--elastic-wait 0"),
        # What cannot go on without a lost worker starts again as a whole.
        (["-n", "2", "--min", "1", "--sync", "local:every=2"], "under --sync local:every=2 its"),
        (["-n", "2", "--min", "1", "--sync", "allreduce:codec=int8"], "what int8 keeps back"),
        (["-n", "2", "--min", "1", "--layout", "stages=2"], "Say with --restarts R how often"),
        (["-n", "2", "--min", "1", "--layout", "stages=auto"], "layout stages=auto spreads"),
        (["-n", "2", "--min", "1", "--pretend-hosts", "2"], "says which worker is on which host"),
        (["-n", "2", "--max", "3", "--restarts", "1", "--sync", "daso"], "Leave --max out"),
        (
            ["-n", "2", "--restarts", "1", "--replace-stragglers", "--layout", "stages=2"],
            "Leave --replace-stragglers out",
        ),
        (["-n", "2", "--restarts", "1", "--trace", "t.json", "--sync", "daso"], "--trace is not"),
        (["--min", "1", "--host-silence", "0"], "--host-silence 0"),
        (["-H", "localhost:1,no.invalid:1", "--min", "1"], "the job was not started.\nhost no.inv"),
        (["-n", "2", "--min", "1", "--sync", "server"], "for jobs without parameter servers"),
        (["-n", "2", "--min", "1", "--horovod"], "horovodrun --min-np"),
    ],
)
def test_refused_before_the_start(words: list[str], said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(99)")
    done = CliRunner().invoke(commands, ["run", *words, str(script)])
    assert done.exit_code not in (0, 99)
    assert said in f"{done.output}{done.exception}"


def test_workers_on_gpus_start_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(pretend_hosts=None, per_gpu=None)
    assert why_all_restart(options, None, None) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "NCCL does not outlive a lost rank" in (why_all_restart(options, None, None) or "")


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("run.distribute(model)", "gets the optimizer's state from the others"),
        (
            "run.distribute(model, optimizer)\n"
            "for x in run.loader(torch.zeros(8, 1), batch_size=1): pass",
            "write `for e in run.epochs(n)`",
        ),
        (
            "run.save('memory://here')",
            "saving to memory://here, an object store, is not there",
        ),
        (
            "run.distribute(model, optimizer, sync=fd.Local(every=2))",
            "--sync local:every=2 is not there",
        ),
    ],
)
def test_refused_in_the_first_lines(sandbox: Any, rest: str, said: str) -> None:
    script = sandbox.script("train.py", LOOP + rest)
    done = sandbox.farandole("run", "-n", "2", "--min", "1", script)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_script_that_cannot_begin_uses_up_no_restarts(sandbox: Any) -> None:
    script = sandbox.script("train.py", "import no_such_module")
    done = sandbox.farandole("run", "-n", "2", "--restarts", "9", script)
    assert done.returncode == 1
    assert "two workers failed in the same way without progress" in done.stderr
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
    assert "of 9 restarts" in done.stderr
    assert "(4 of 9 restarts)" not in done.stderr


def test_a_script_that_asks_for_more_is_restarted_as_a_whole(sandbox: Any) -> None:
    """Only its error tells that it cannot go on without a lost worker."""
    rest = """
import os, signal
run.distribute(model, optimizer, sync=fd.Local(every=2))
for epoch in run.epochs(2):
    for x in run.loader(torch.zeros(8, 1), batch_size=1):
        model(x).sum().backward()
        optimizer.step()
    if os.environ["FARANDOLE_ATTEMPT"] == "0" and run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
run.print("done at", run.steps)
"""
    script = sandbox.script("train.py", LOOP + rest)
    done = sandbox.farandole("run", "-n", "2", "--restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert "NotElasticError: --sync local:every=2 is not there" in done.stderr
    assert "all workers start again from the last checkpoint: the script does" in done.stderr
    assert "all 2 workers start again (1 of 1 restarts), from the beginning" in done.stderr
    assert "done at 8" in done.stdout

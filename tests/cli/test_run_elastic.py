"""What `farandole run --min` refuses: before the start, or in the first lines of the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farandole.cli import commands

LOOP = """
import torch, farandole as fd
run = fd.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "--min", "3"], "-n 2 must be between --min 3 and --max 2"),
        (["-n", "4", "--min", "0"], "--min 0: a job needs at least 1 worker"),
        (["-n", "4", "--max", "3", "--min", "1"], "--max 3"),
        (["--min", "1", "--restarts", "-1"], "--restarts -1"),
        (["--min", "1", "--replace-stragglers"], "--restarts how many may be replaced"),
        (["--min", "1", "--elastic-wait", "0"], "--elastic-wait 0"),
        (["-n", "2", "--min", "1", "--sync", "local:every=2"], "--sync local:every=2 is not there"),
        (["-n", "2", "--min", "1", "--sync", "allreduce:codec=int8"], "what int8 keeps back"),
        (["-n", "2", "--min", "1", "--layout", "stages=2"], "--layout is not there"),
        (["-n", "2", "--min", "1", "--pretend-hosts", "2"], "--pretend-hosts is not there"),
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

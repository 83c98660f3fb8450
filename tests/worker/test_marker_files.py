"""A job whose workers never joined ran N copies of its script: the launcher says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.launch.job import Outcome
from farandole.launch.outcome_text import print_outcome
from farandole.worker.failure import Failure
from farandole.worker.marker_files import any_joined, record_joined

if TYPE_CHECKING:
    from conftest import Sandbox

NOTE = "none of the 2 workers joined the others"

PLAIN_TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def test_a_script_that_never_joins(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "2", sandbox.script("alone.py", "print('trained')"))
    assert (done.returncode, done.stdout.count("trained")) == (0, 2)
    assert NOTE in done.stderr
    assert "`run = fd.init()`" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        PLAIN_TORCH,
        "import farandole as fd\nfd.init()",
        "import farandole.horovod.torch as hvd\nhvd.init()",
    ],
)
def test_a_script_that_joins(sandbox: Sandbox, text: str) -> None:
    done = sandbox.farandole("run", "-n", "2", sandbox.script("joins.py", text))
    assert (done.returncode, done.stderr) == (0, "")


def test_one_worker_has_nobody_to_join(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcome(Outcome(joined=False), 1)
    assert capsys.readouterr().err == ""
    print_outcome(Outcome(joined=False), 2)
    assert NOTE in capsys.readouterr().err


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(joined=False, stopped_by="SIGINT"),
        Outcome(Failure(1, 3, "no luck", 0), (1,), joined=False, logs=Path("logs")),
    ],
)
def test_a_job_that_ended_otherwise_says_why(
    outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    print_outcome(outcome, 2)
    assert NOTE not in capsys.readouterr().err


def test_only_workers_of_a_launcher_say_that_they_joined(tmp_path: Path) -> None:
    record_joined({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank-0.error.json")})
    record_joined({"FARANDOLE_JOB": "x"})
    assert not any_joined(tmp_path)
    record_joined(
        {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank-0.error.json"), "FARANDOLE_JOB": "x"}
    )
    assert any_joined(tmp_path)

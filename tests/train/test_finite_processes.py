"""Real processes: a gradient that is not finite ends a job, unless it is told to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "not_finite.py"


def facts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("sync", ["allreduce:codec=int8", "hogwild"])
def test_a_job_ends_with_an_error_on_all_ranks(sandbox: Sandbox, tmp_path: Path, sync: str) -> None:
    done = sandbox.farandole("run", "-n", "2", "--sync", sync, SCRIPT, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DivergedError: rank 1, step 3: its gradient of" in done.stdout + done.stderr
    for rank in (0, 1) if sync != "hogwild" else (1,):  # the launcher stops the other there
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["error"].startswith("rank 1, step 3: its gradient of"), f"rank {rank}"
        assert facts["is_finite"]
        assert facts["steps"] == 2


def test_a_job_goes_on_if_told_to(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.farandole("run", "-n", "2", "--no-check-finite", SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert facts_of(tmp_path) == [{"error": None, "steps": 6, "is_finite": False}] * 2


def test_horovods_interface_checks_nothing(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "horovod_nan.py",
        """
import torch
import farandole.horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
)
(model(torch.ones(1, 2)) * torch.nan).sum().backward()
optimizer.step()
assert model.weight.isnan().all()
""",
    )
    done = sandbox.python(script)
    assert done.returncode == 0, done.stderr

"""An elastic script in Horovod's style, from the command line to its last step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "elastic_train.py"


def serial(steps: int) -> list[Any]:
    """The weights of the same training in one process that nothing happens to."""
    batches = torch.arange(64.0).reshape(4, 4, 4).sin()
    model = torch.nn.Linear(4, 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = batches[step % 4]
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def test_a_worker_killed_a_host_added_and_one_removed(sandbox: Sandbox) -> None:
    sandbox.script("hosts", "localhost:2\n")
    sandbox.script("discover.sh", "#!/bin/sh\ncat hosts\n").chmod(0o755)
    done = sandbox.farandole(
        "horovodrun",
        *("-np", "2", "--min-np", "2", "--max-np", "4"),
        *("--host-discovery-script", "./discover.sh"),
        *(sys.executable, SCRIPT),
    )
    assert done.returncode == 0, done.stderr
    assert sandbox.processes() == []
    assert (sandbox.folder / "killed").exists()
    result = json.loads((sandbox.folder / "result").read_text())
    weights, bias = serial(result["step"])
    assert len(result["weights"]) == 2
    for found in result["weights"]:
        assert found == result["weights"][0]
        assert found[0][0] == pytest.approx(weights[0], rel=1e-4)
        assert found[1] == pytest.approx(bias, rel=1e-4, abs=1e-6)
    assert done.stderr.splitlines() == [
        "farandole: worker 1 on localhost (rank 1) was killed by SIGKILL; another takes its place",
        "farandole: generation 1: 2 workers on localhost:2; rank 0 is worker 0",
        "farandole: the hosts are now localhost:2, 127.0.0.1:1; they were localhost:2",
        "farandole: generation 2: 3 workers on localhost:2, 127.0.0.1:1; rank 0 is worker 0",
        "farandole: the hosts are now localhost:2; they were localhost:2, 127.0.0.1:1",
        "farandole: generation 3: 2 workers on localhost:2; rank 0 is worker 0",
    ]
    assert sorted(done.stdout.splitlines()) == [
        "[0] reset: 0 of 2, on 1 hosts",
        "[0] reset: 0 of 2, on 1 hosts",
        "[0] reset: 0 of 3, on 2 hosts",
        "[2] reset: 1 of 2, on 1 hosts",
        "[2] reset: 1 of 3, on 1 hosts",
    ]


def test_a_stopped_worker_is_replaced_when_the_others_have_noticed(sandbox: Sandbox) -> None:
    """Not after `--elastic-timeout`, which is 600 s."""
    script = sandbox.script(
        "stopped.py",
        """
import os, signal
from pathlib import Path
import horovod.torch as hvd
import torch

hvd.init()

@hvd.elastic.run
def train(state):
    while state.step < 3:
        if hvd.rank() == 1 and state.step == 1 and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        hvd.allreduce(torch.ones(1), name="one")
        state.step += 1
        state.commit()

train(hvd.elastic.ObjectState(step=0))
""",
    )
    done = sandbox.farandole(
        "horovodrun",
        *("-np", "2", "--min-np", "2", "-H", "localhost:2", "--gloo-timeout-seconds", "8"),
        *(sys.executable, script),
    )
    assert done.returncode == 0, done.stderr
    assert sandbox.processes() == []
    assert (
        "farandole: worker 1 on localhost (rank 1) was stopped (SIGSTOP), and did not ask for its "
        "new rank, and was ended; another takes its place"
    ) in done.stderr.splitlines()

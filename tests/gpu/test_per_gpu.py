"""`farandole run --per-gpu` with NVIDIA's own MPS, on a real GPU."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

TRAIN = """
import os, time
from pathlib import Path
import torch, farandole as fd

run = fd.init()
model = torch.nn.Linear(256, 256)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
data = torch.utils.data.TensorDataset(torch.ones(4096, 256))
for epoch in run.epochs(1_000 if "FARANDOLE_GPU_TRIAL" in os.environ else 1):
    for (x,) in run.loader(data, batch_size=32):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if "FARANDOLE_GPU_TRIAL" not in os.environ:
        run.log(epoch=epoch)
print("trained on", run.device, "of", torch.cuda.device_count(), flush=True)
Path(f"ready-{run.rank}").touch()
time.sleep(float(os.environ.get("LINGER", "0")))
"""


@pytest.fixture
def script(sandbox: Sandbox) -> Iterator[str]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("there is no MPS")
    yield str(sandbox.script("train.py", TRAIN))
    assert servers(sandbox) == []
    assert list(sandbox.temporary.glob("farandole-mps-*")) == []


def servers(sandbox: Sandbox) -> list[psutil.Process]:
    """MPS daemons and servers of this test."""
    found = []
    for process in sandbox.processes():
        if process.name().startswith("nvidia-cuda-mps"):
            found.append(process)
    return found


@pytest.mark.fresh
def test_workers_share_a_gpu_under_mps(sandbox: Sandbox, script: str) -> None:
    launcher = sandbox.start_farandole(
        "run", "--per-gpu", "2", script, CUDA_VISIBLE_DEVICES="0", LINGER="5"
    )
    sandbox.wait_until(
        lambda: launcher.poll() is not None or (sandbox.folder / "ready-1").exists(), "it trains"
    )
    names = sorted(process.name() for process in servers(sandbox))
    out, said = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, said
    assert names == ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"], "the workers are clients"
    shown = sorted(line for line in out.splitlines() if "trained on" in line)
    assert shown == [f"[{rank}] trained on cuda:0 of 1" for rank in range(2)]
    (metrics,) = (sandbox.folder / "runs").rglob("metrics.jsonl")
    assert metrics.read_text().count('"gpu_peak_bytes"') == 1


@pytest.mark.fresh
def test_a_launcher_that_is_killed(sandbox: Sandbox, script: str) -> None:
    launcher = sandbox.start_farandole(
        "run", "--per-gpu", "2", script, CUDA_VISIBLE_DEVICES="0", LINGER="600"
    )
    sandbox.wait_until(
        lambda: launcher.poll() is not None or (sandbox.folder / "ready-1").exists(), "it trains"
    )
    assert len(servers(sandbox)) == 2
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=400)
    sandbox.wait_until_gone()


@pytest.mark.fresh
def test_the_fastest_number(sandbox: Sandbox, script: str) -> None:
    launcher = sandbox.start_farandole("run", "--per-gpu", "auto", script, CUDA_VISIBLE_DEVICES="0")
    _, said = launcher.communicate(timeout=580)
    assert launcher.returncode == 0, said
    rows = [line.split() for line in said.splitlines() if line.startswith("   ")]
    measured = {row[0]: row[1] for row in rows if row[0] in ("1", "2", "4", "8")}
    assert set(measured) == {"1", "2", "4", "8"}
    assert all(float(rate.replace(",", "")) > 0 for rate in measured.values()), said
    assert "a GPU are the fastest" in said

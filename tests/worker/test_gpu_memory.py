"""The peak of every rank, in the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farandole.report.history import read_history
from farandole.testing import run_world
from farandole.train.run import Run
from farandole.worker import gpu_memory


def test_every_rank_has_a_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this world are threads without GPUs: what they would say is made up."""
    monkeypatch.setattr(gpu_memory, "peak_bytes", lambda device: 5 * 2**30)

    def body(run: Run) -> None:
        model = torch.nn.Linear(2, 1)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for epoch in run.epochs(2):
            for (x,) in run.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 1):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            run.log(epoch=epoch)
        run.close()

    run_world(2, body, folder=tmp_path)
    (path,) = tmp_path.rglob("metrics.jsonl")
    assert read_history(path).gpu_peak_bytes == (5 * 2**30, 5 * 2**30)
    assert path.read_text().count('"memory"') == 1, "written when it changes"


def test_without_gpus_nothing_is_sent(tmp_path: Path) -> None:
    found = run_world(
        2, lambda run: gpu_memory.gather_peaks(run.group, run.device), folder=tmp_path
    )
    assert found == [None, None]

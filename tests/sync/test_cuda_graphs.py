"""CUDA graphs with several workers. The GPU is a pretence here; tests/gpu has the real thing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from farandole.comm.gpu import cuda_graphs
from farandole.errors import UserError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.testing.horovod import run_horovod
from farandole.train import Run


def test_a_graph_is_being_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for initialised, capturing in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)  # noqa: B023
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
        assert cuda_graphs.is_captured() == (initialised and capturing)


@pytest.mark.parametrize("strategy", ["allreduce", "local:every=2", "lagged"])
def test_a_replay_would_leave_the_exchange_out(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(run: Run) -> list[str]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer, sync=parse(strategy))
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        run.group.barrier()
        monkeypatch.setattr(cuda_graphs, "is_captured", lambda: True)
        run.group.barrier()
        said = []
        for act in (lambda: model(torch.ones(4, 3)).sum().backward(), optimizer.step):
            try:
                act()
            except UserError as error:
                said.append(str(error))
        return said

    for said in run_world(2, body, folder=tmp_path):
        captured = ["a step of an optimizer"]
        if strategy != "local:every=2":  # whose backward passes are each rank's own
            captured = ["a backward pass", *captured]
        assert [text.split(",")[0].split("around ")[1] for text in said] == captured
        assert all("mode='reduce-overhead'" in text for text in said)


def test_one_worker_may_capture_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(run: Run) -> bool:
        model = nn.Linear(3, 2)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer)
        monkeypatch.setattr(cuda_graphs, "is_captured", lambda: True)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return torch.allclose(model.weight, before - 0.4)

    assert run_world(1, body, folder=tmp_path) == [True]


def test_horovod_s_collectives_are_no_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> str:
        hvd.allreduce(torch.ones(3), name="before")
        hvd.barrier()
        monkeypatch.setattr(cuda_graphs, "is_captured", lambda: True)
        with pytest.raises(UserError) as refusal:
            hvd.allreduce_async(torch.ones(3), name="captured")
        return str(refusal.value)

    for said in run_horovod(2, body):
        assert "captured around 'allreduce.captured', a collective" in said


def test_layers_are_not_replaced_under_a_graph(tmp_path: Path) -> None:
    def make_graphed_callables(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """As torch's leaves it: another forward, which runs a graph of the layers of before."""
        before = module.forward

        def new_fwd(x: torch.Tensor) -> torch.Tensor:
            return before(x)

        return new_fwd

    def body(run: Run) -> str:
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        model[0].forward = make_graphed_callables(model[0])
        run.distribute(model, sync=parse("allreduce"))
        with pytest.raises(UserError) as refusal:
            run.distribute(copy.deepcopy(model), sync=parse("allreduce:batchnorm=sync"))
        return str(refusal.value)

    for said in run_world(2, body, folder=tmp_path):
        assert "has captured its part '0'" in said
        assert "batchnorm=sync replaces layers" in said

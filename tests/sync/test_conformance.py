"""Every strategy converges, brings its ranks in step, and does the same on threads and processes.

Each runs one training script on 4 ranks of 2 hosts (a lock-free or served one on one host), with
a learning-rate scheduler and BatchNorm.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.sync import STRATEGIES, parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from tests.conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "conform.py"
HOSTS = Topology.declared([2, 2])
ONE_POINT = 0.01


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conform", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["conform"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


conform: Any = _load()


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The accuracy of one rank, which needs no strategy."""
    folder = tmp_path_factory.mktemp("serial")
    (outcome,) = run_world(1, lambda run: conform.train(run, None), folder=folder)
    assert outcome.accuracy > 0.95, "digits are not that hard"
    return float(outcome.accuracy)


def in_process(text: str, folder: Path, **options: int) -> list[Any]:
    return run_world(
        4,
        lambda run: conform.train(run, parse(text), **options),
        folder=folder,
        topology=HOSTS if text in conform.REPEATABLE else None,
    )


def test_every_strategy_is_among_them() -> None:
    assert {parse(text).name for text in conform.STRATEGIES} == set(STRATEGIES)


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("text", conform.STRATEGIES)
def test_it_converges_and_its_ranks_are_in_step_after_each_epoch(
    text: str, serial: float, tmp_path: Path
) -> None:
    outcomes = in_process(text, tmp_path)
    assert outcomes[0].accuracy >= serial - ONE_POINT
    assert all(all(outcome.in_step) for outcome in outcomes)


@pytest.mark.needs("sklearn")
def test_processes_do_what_threads_do(
    sandbox: Sandbox, two_ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    common = two_ranks[0] | {"WORLD_SIZE": "4", "FARANDOLE_PRETEND_HOSTS": "2"}
    for end in sandbox.by_hand(
        [common | {"RANK": str(rank)} for rank in range(4)], SCRIPT, tmp_path
    ):
        assert end.returncode == 0, end.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert {rank["transport"] for rank in found} == {"shm"}
    for text in (*conform.REPEATABLE, *conform.SERVED):
        threads = in_process(text, tmp_path, epochs=conform.FEW_EPOCHS)
        for theirs, mine in zip(found, threads, strict=True):
            assert theirs[text]["in_step"] == mine.in_step, text
            assert theirs[text]["weights"] == pytest.approx(mine.weights, rel=1e-9), text


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("text", ["local:every=4", "lagged:steps=4", "daso", "postlocal:every=4"])
def test_accumulating_gradients_changes_little(text: str, serial: float, tmp_path: Path) -> None:
    outcomes = in_process(text, tmp_path, accumulate=2)
    assert outcomes[0].accuracy >= serial - 2 * ONE_POINT  # BatchNorm sees half the batches
    assert all(all(outcome.in_step) for outcome in outcomes)


SAVED_AT = [(0, 1), (1, 2), (1, -1), (2, 3)]  # epoch and step; -1: after the last
EPOCHS, STEPS = 4, 5


class Script:
    """Trains; saves at `save_at` and stops, or loads and goes on."""

    def __init__(self, save_at: tuple[int, int] | None = None, *, load: bool = False) -> None:
        self.save_at, self.load = save_at, load

    def __call__(self, run: Run) -> dict[str, torch.Tensor] | None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(STEPS * 12 - 5, 6, generator=generator)
        data = TensorDataset(x, torch.randint(3, (len(x),), generator=generator))
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
        first = torch.Generator().manual_seed(7 if self.load else 5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=first) * 0.3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        wrapped, optimizer = run.distribute(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.6)
        state = run.load() if self.load else None
        if state:
            scheduler.load_state_dict(state["scheduler"])
        for epoch in run.epochs(EPOCHS):
            for step, (inputs, labels) in enumerate(run.loader(data, global_batch_size=12)):
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(inputs), labels)
                loss.backward()
                run.observe_loss(loss)
                optimizer.step()
                if self.save_at == (epoch, step):
                    run.save(scheduler=scheduler.state_dict())
                    return None
            scheduler.step()
            if self.save_at == (epoch, -1):
                run.save(scheduler=scheduler.state_dict())
                return None
        moments = {
            f"{index}.{name}": value.clone()
            for index, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        return {**{k: v.clone() for k, v in model.state_dict().items()}, **moments}


Ends = list[dict[str, torch.Tensor] | None]
Uninterrupted = Callable[[str], Ends]


def resumable_world(text: str, script: Script, folder: Path) -> Ends:
    hosts = Topology.declared([2, 1])
    return run_world(3, script, folder=folder, sync=parse(text), topology=hosts)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """What a run without a stop ends with: one for each strategy, wherever others are stopped."""

    @functools.cache
    def ends(text: str) -> Ends:
        return resumable_world(text, Script(), tmp_path_factory.mktemp("whole"))

    return ends


@pytest.mark.parametrize("save_at", SAVED_AT)
@pytest.mark.parametrize(
    "text",
    [
        "lagged:steps=2,first=0,last=0.3",
        "local:every=3",
        "adacomm:start=4,steps=4",
        "postlocal:every=3",
        "diloco:every=7",
        "federated:every=3",
        "daso:every=3,wait=2",
        "daso:every=3,wait=2,warmup=0.3,cooldown=0.3,codec=int8,patience=1",
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(
    text: str, save_at: tuple[int, int], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    whole = uninterrupted(text)
    resumable_world(text, Script(save_at), tmp_path)
    resumed = resumable_world(text, Script(load=True), tmp_path)
    for rank, (expected, found) in enumerate(zip(whole, resumed, strict=True)):
        assert expected is not None
        assert found is not None
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"rank {rank}: {name}"


@pytest.mark.parametrize("text", ["daso:every=2,warmup=0", "adacomm:start=4,steps=4", "lagged"])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_workers(
    text: str, tmp_path: Path
) -> None:
    sync, hosts = parse(text), Topology.declared([2, 1])
    run_world(3, Script((1, 1)), folder=tmp_path, sync=sync, topology=hosts)
    with pytest.warns(UserWarning, match="saved on 3 workers, resumed on 2"):
        ended = run_world(
            2,
            Script(load=True),
            folder=tmp_path,
            sync=sync,
            topology=Topology.declared([1, 1]),
        )
    first, second = ended
    assert first is not None
    assert second is not None
    assert all(torch.equal(first[name], second[name]) for name in ("0.weight", "3.weight"))


class Branches(nn.Module):
    """Takes one of two ways by the number of the call, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.ways[self.calls % 2](x)  # type: ignore[no-any-return]


def train_branches(run: Run) -> bool:
    model = Branches()
    wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.ones(24, 6), torch.zeros(24, dtype=torch.int64))
    for _ in run.epochs(3):
        for x, y in run.loader(data, global_batch_size=4):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            run.observe_loss(loss)
            optimizer.step()
    return bool(run.check_in_step(wrapped))


@pytest.mark.parametrize("text", ["lagged:steps=2,first=0", "daso:warmup=0", "postlocal:at=0.5"])
def test_some_ranks_may_not_use_a_parameter(text: str, tmp_path: Path) -> None:
    hosts = Topology.declared([1, 1])
    sync = parse(text)
    assert run_world(2, train_branches, folder=tmp_path, sync=sync, topology=hosts) == [True, True]

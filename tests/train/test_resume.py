"""A run that was saved and loaded goes on as if it had never stopped, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from farandole.errors import CheckpointError, UserError
from farandole.sync import AllReduce
from farandole.testing import run_world
from farandole.train import Run

COUNT, BATCH, EPOCHS = 31, 8, 3  # 4 steps an epoch, the last one uneven

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(groups(model), 0.01, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(groups(model), 0.01, betas=(0.8, 0.95)),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2, history_size=3),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    deep = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    return [{"params": deep, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}]


class Net(nn.Module):
    """Tied weights, an empty and a 0-d buffer, BatchNorm's counters, and dropout on request."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into = nn.Linear(5, 5)
        self.back = nn.Linear(5, 5)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)
        self.dropout = dropout
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden = F.dropout(torch.tanh(self.into(x)), self.dropout, self.training)
        return self.out(self.norm(self.back(hidden)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


class Script:
    """A training script. `save_at` (epoch, step): saves there and, if `stop`, ends."""

    def __init__(
        self,
        *,
        optimizer: str = "sgd",
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        sampler: bool = False,
        save_at: tuple[int, int] | None = None,
        stop: bool = False,
        load: bool = False,
        epochs: int = EPOCHS,
    ) -> None:
        self.optimizer, self.dropout, self.dtype = optimizer, dropout, dtype
        self.sampler = sampler
        self.save_at, self.stop, self.load, self.epochs = save_at, stop, load, epochs

    def __call__(self, run: Run) -> dict[str, Any]:
        model = self._model(run)
        wrapped, optimizer = run.distribute(model, OPTIMIZERS[self.optimizer](model))
        if run.size == 1 and not self.load:
            torch.manual_seed(11)
        source: Any = data()
        if self.sampler:
            sampler = WeightedRandomSampler([1.0] * COUNT, COUNT)  # from torch's own generator
            source = DataLoader(source, sampler=sampler)
        restored = run.load() if self.load else None
        seen: list[tuple[int, int, float]] = []
        for epoch in run.epochs(self.epochs):
            for step, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
                seen.append((epoch, step, self._step(wrapped, optimizer, x.to(self.dtype), y)))
                if self.save_at == (epoch, step):
                    run.save(note="here", losses=seen)
                    if self.stop:
                        return {"seen": seen}
            if self.save_at == (epoch, -1):  # after the loader has finished
                run.save()
                if self.stop:
                    return {"seen": seen}
        return {
            "seen": seen,
            "weights": {k: v.clone() for k, v in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "restored": restored,
            "counters": (run.samples, run.steps, run.epoch),
            "draws": (random.random(), np.random.rand(), torch.rand(3).tolist()),
            "tied": model.back.weight is model.into.weight,
        }

    def _model(self, run: Run) -> Net:
        model = Net(self.dropout)
        generator = torch.Generator().manual_seed(100 if self.load else run.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        return model.to(self.dtype)

    def _step(self, model: nn.Module, optimizer: Optimizer, x: Any, y: Any) -> float:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(x).float(), y)
            value.backward()
            return value

        return optimizer.step(loss).item()


def assert_same_end(went_on: dict[str, Any], never_stopped: dict[str, Any]) -> None:
    assert went_on["tied"]
    left, right = went_on["weights"], never_stopped["weights"]
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert left[name].dtype == value.dtype
        assert torch.equal(left[name], value), name
    assert same(went_on["optimizer"], never_stopped["optimizer"])
    assert went_on["counters"] == never_stopped["counters"]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def stop_and_go_on(
    folder: Path, size: int, save_at: tuple[int, int], **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """What the ranks returned: never stopped, up to the stop, and after it."""
    whole = run_world(size, Script(**options), folder=folder / "whole")
    before = run_world(size, Script(save_at=save_at, stop=True, **options), folder=folder / "cut")
    after = run_world(size, Script(load=True, **options), folder=folder / "cut")
    return whole, before, after


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("save_at", [(1, 1), (0, 2), (1, -1)], ids=str)
def test_alone_with_dropout(tmp_path: Path, optimizer: str, save_at: tuple[int, int]) -> None:
    options = {"optimizer": optimizer, "dropout": 0.3}
    (whole,), (before,), (after,) = stop_and_go_on(tmp_path, 1, save_at, **options)
    epochs = [(epoch, loss) for epoch, _, loss in whole["seen"]]
    assert [(e, loss) for e, _, loss in before["seen"] + after["seen"]] == epochs
    assert_same_end(after, whole)
    assert after["draws"][2] == whole["draws"][2]  # and the generator stands where it stood


@pytest.mark.parametrize("save_at", [(1, 1), (1, -1)], ids=str)
def test_on_three_ranks(tmp_path: Path, save_at: tuple[int, int]) -> None:
    whole, before, after = stop_and_go_on(tmp_path, 3, save_at, optimizer="adam")
    for rank in range(3):
        assert_same_end(after[rank], whole[rank])
        losses = [loss for _, _, loss in whole[rank]["seen"]]
        assert [loss for _, _, loss in before[rank]["seen"] + after[rank]["seen"]] == losses


@settings(max_examples=6, deadline=None)
@given(epoch=st.integers(0, EPOCHS - 1), step=st.integers(-1, 2), sampler=st.booleans())
def test_wherever_it_was_saved(
    tmp_path_factory: pytest.TempPathFactory, epoch: int, step: int, sampler: bool
) -> None:
    folder = tmp_path_factory.mktemp("anywhere")
    (whole,), _, (after,) = stop_and_go_on(folder, 1, (epoch, step), sampler=sampler, dropout=0.2)
    assert_same_end(after, whole)


def test_in_half_precision(tmp_path: Path) -> None:
    (whole,), _, (after,) = stop_and_go_on(tmp_path, 1, (1, 0), dtype=torch.bfloat16)
    assert whole["weights"]["out.weight"].dtype == torch.bfloat16
    assert_same_end(after, whole)


def test_user_state_comes_back(tmp_path: Path) -> None:
    _, (before,), (after,) = stop_and_go_on(tmp_path, 1, (0, 2))
    assert after["restored"] == {"note": "here", "losses": before["seen"]}


def test_python_s_and_numpy_s_generators_go_on_too(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[float, ...]:
        if run.load() is None:
            random.seed(5)
            np.random.seed(6)
            torch.manual_seed(7)
            random.gauss(0, 1)  # leaves half a pair behind, which is state too
            np.random.normal()
            run.save()
        return random.gauss(0, 1), random.random(), np.random.normal(), float(torch.rand(()))

    assert run_world(1, body, folder=tmp_path) == run_world(1, body, folder=tmp_path)


def test_saved_twice_the_later_one_counts(tmp_path: Path) -> None:
    script = Script(save_at=(1, 0), stop=True)
    run_world(1, script, folder=tmp_path / "cut")
    middle = Script(save_at=(2, 1), stop=True, load=True)
    run_world(1, middle, folder=tmp_path / "cut")
    (after,) = run_world(1, Script(load=True), folder=tmp_path / "cut")
    (whole,) = run_world(1, Script(), folder=tmp_path / "whole")
    assert_same_end(after, whole)
    assert [path.name for path in sorted((tmp_path / "cut/world/checkpoints").iterdir())] == [
        "000000",
        "000001",
    ]


def test_several_models(tmp_path: Path) -> None:
    def body(run: Run) -> list[list[float]]:
        models = [nn.Linear(2, 2, bias=False), nn.Linear(3, 1), nn.Linear(1, 1)]
        wrapped = []
        for model in models[:2]:
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
            wrapped.append((*run.distribute(model, optimizer), model.in_features))
        run.distribute(models[2])  # and one without an optimizer
        if run.load() is None:
            _practise(wrapped)
            run.save()
        _practise(wrapped)
        return [parameter.tolist() for model in models for parameter in model.parameters()]

    first = run_world(2, body, folder=tmp_path)
    assert run_world(2, body, folder=tmp_path) == first


def _practise(wrapped: list[tuple[nn.Module, Optimizer, int]]) -> None:
    for model, optimizer, width in wrapped:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, width)).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize(("first", "then"), [(3, 2), (1, 3), (2, 1)])
def test_another_number_of_workers_is_said_and_works(tmp_path: Path, first: int, then: int) -> None:
    (whole, *_) = run_world(first, Script(), folder=tmp_path / "whole")
    run_world(first, Script(save_at=(1, 1), stop=True), folder=tmp_path / "cut")
    with pytest.warns(UserWarning, match=f"saved on {first} workers, resumed on {then}"):
        results = run_world(then, Script(load=True), folder=tmp_path / "cut")
    assert whole["counters"][0] == COUNT * EPOCHS
    for result in results:
        assert result["counters"] == whole["counters"]
        for name, value in result["weights"].items():
            if "running" not in name:  # BatchNorm's own statistics are each rank's
                assert torch.equal(value, results[0]["weights"][name]), name


def test_another_strategy_is_said(tmp_path: Path) -> None:
    run_world(2, Script(save_at=(1, 1), stop=True), folder=tmp_path)
    with pytest.warns(
        UserWarning, match="saved under allreduce, resumed under allreduce:algorithm=ring"
    ):
        run_world(2, Script(load=True), folder=tmp_path, sync=AllReduce(algorithm="ring"))


def test_nothing_to_resume(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        run.distribute(nn.Linear(1, 1))
        assert run.load() is None
        assert not run.resumed
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*elsewhere"):
            run.load(tmp_path / "elsewhere")
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            run.load(tmp_path / "empty")

    run_world(2, body, folder=tmp_path)


def test_state_without_models(tmp_path: Path) -> None:
    def body(run: Run) -> Any:
        run.save(best=0.5)
        return run.load()

    assert run_world(2, body, folder=tmp_path) == [{"best": 0.5}] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 3), r"does not fit[^~]*weight.*\[2, 2\]"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"does not fit[^~]*0\.weight"),
    ],
)
def test_a_checkpoint_of_another_model(
    tmp_path: Path, make: Callable[[], nn.Module], message: str
) -> None:
    def save(run: Run) -> None:
        run.distribute(nn.Linear(2, 2))
        run.save()

    def load(run: Run) -> None:
        run.distribute(make())
        with pytest.raises(CheckpointError, match=message):
            run.load()
        run.group.barrier()

    run_world(2, save, folder=tmp_path)
    run_world(2, load, folder=tmp_path)


def test_load_before_distribute_says_so(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        if run.size == 1:
            run.distribute(nn.Linear(2, 2))
            run.save()
            return
        with pytest.raises(CheckpointError, match=r"1 model.*distributed 0.*after run\.distribute"):
            run.load()

    run_world(1, body, folder=tmp_path)
    run_world(2, body, folder=tmp_path)


def test_keep_must_leave_something(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep=0"):
        run_world(1, lambda run: run.save(keep=0), folder=tmp_path)

"""Strategies that average models now and then go on from a checkpoint, to the last bit.

Wherever it was saved: in the middle of a period each rank has a model of its own, and the shared
model of the checkpoint is their average.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from farandole.sync import Local, parse
from farandole.sync.periodic.base import Periodic
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint.checkpoint import newest, read

EPOCHS, STEPS = 3, 4

STRATEGIES = [
    "local:every=3",
    "local:every=3,moments=average,meet_epochs=false",
    "local:every=5,momentum=0.5",
    "local:every=3,codec=int8",
    "local:every=3,codec=topk:ratio=0.1",
    "diloco:every=5",
    "diloco:every=3,codec=int8,moments=reset",
    "federated:every=5,fraction=0.6,codec=fp16",
    "adacomm:start=5,steps=4,momentum=0.5",
    "adacomm:start=5,steps=4,rate=defer",
    "postlocal:every=3,below=0.2",  # of 0.1, 0.04, 0.016: local in the last epoch
    "postlocal:every=3,at=0.4,momentum=0.5,codec=topk:ratio=0.1",
]
PLACES = [
    (0, 1),  # in the first period
    (1, 0),  # in a period that began in another epoch, with some of them
    (1, 2),  # at the end of a period of 3 steps
    (1, -1),  # after an epoch
]


class Net(nn.Module):
    """Large enough for a codec; half of it is unfrozen on the way; a rank's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 200)
        self.norm = nn.BatchNorm1d(200)
        self.out = nn.Linear(200, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum(0).detach() * self.training
        return self.out(torch.tanh(self.norm(self.into(x))))


def net(seed: int = 0) -> Net:
    model = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * 10 - 3, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (len(x),), generator=generator))


class Script:
    """Trains; saves at `save_at`, an epoch and a step, and stops; or loads and goes on."""

    def __init__(
        self,
        save_at: tuple[int, int] | None = None,
        *,
        load: bool = False,
        unfreeze: bool = False,
        momentum: float = 0.9,
    ) -> None:
        self.save_at, self.load, self.unfreeze, self.momentum = save_at, load, unfreeze, momentum

    def __call__(self, run: Run) -> dict[str, Any]:
        model = net(seed=9 if self.load else 0)
        model.into.requires_grad_(not self.unfreeze)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=self.momentum)
        wrapped, _ = run.distribute(model, optimizer)
        scheduler = StepLR(optimizer, 1, 0.4)
        state = run.load() if self.load else None
        if state is not None:
            scheduler.load_state_dict(state["scheduler"])
        source = data()
        for epoch in run.epochs(EPOCHS):
            model.into.requires_grad_(not self.unfreeze or epoch >= 1)
            for step, (x, y) in enumerate(run.loader(source, global_batch_size=10)):
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                loss.backward()
                run.observe_loss(loss)
                optimizer.step()
                if self.save_at == (epoch, step):
                    run.save(scheduler=scheduler.state_dict())
                    return dict(tensors("model", model.state_dict()))
            scheduler.step()
            if self.save_at == (epoch, -1):
                run.save(scheduler=scheduler.state_dict())
                return {}
        strategy = run._session.models.synchronizers[0].state_dict()
        strategy.pop("seconds", None)
        return {
            **dict(tensors("model", model.state_dict())),
            **dict(tensors("optimizer", optimizer.state_dict())),
            **dict(tensors("strategy", strategy)),
        }


def tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is at the leaves of a nested state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(f"{name}.{key}", item)
    elif isinstance(value, list):
        yield from tensors(name, dict(enumerate(value)))
    else:
        yield name, value.clone() if isinstance(value, torch.Tensor) else value


@functools.cache
def never_stopped(text: str, unfreeze: bool = False) -> list[dict[str, Any]]:
    folder = Path("never-written-because-nothing-is-saved")
    return run_world(3, Script(unfreeze=unfreeze), folder=folder, sync=parse(text))


def assert_goes_on(text: str, save_at: tuple[int, int], folder: Path, **options: Any) -> None:
    run_world(3, Script(save_at, **options), folder=folder, sync=parse(text))
    found = run_world(3, Script(load=True, **options), folder=folder, sync=parse(text))
    expected = never_stopped(text, **options)
    for rank in range(3):
        assert found[rank].keys() == expected[rank].keys()
        for name, value in expected[rank].items():
            same = found[rank][name] == value
            assert bool(same.all() if isinstance(same, torch.Tensor) else same), f"{rank}: {name}"


@pytest.mark.parametrize("save_at", PLACES, ids=str)
@pytest.mark.parametrize("text", STRATEGIES)
def test_wherever_it_was_saved(text: str, save_at: tuple[int, int], tmp_path: Path) -> None:
    assert_goes_on(text, save_at, tmp_path)


@pytest.mark.parametrize("save_at", [(0, 1), (1, 0), (1, -1)], ids=str)
@pytest.mark.parametrize(
    "text", ["local:every=3", "local:every=5,momentum=0.5", "local:every=3,codec=int8"]
)
def test_after_more_was_trained_than_at_first(
    text: str, save_at: tuple[int, int], tmp_path: Path
) -> None:
    """The model is as frozen when it is loaded as it was when the script began."""
    assert_goes_on(text, save_at, tmp_path, unfreeze=True)


@pytest.mark.parametrize(
    "text", ["local:every=3,codec=int8", "diloco:every=5", "adacomm:start=5,steps=4"]
)
def test_what_the_strategy_remembers_is_needed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the runs above would end elsewhere: the tests can fail."""
    run_world(3, Script((1, 0)), folder=tmp_path, sync=parse(text))
    monkeypatch.setattr(Periodic, "load_state_dict", lambda self, state: None)
    found = run_world(3, Script(load=True), folder=tmp_path, sync=parse(text))
    expected = never_stopped(text)
    assert not torch.equal(found[0]["model.out.weight"], expected[0]["model.out.weight"])


# On other numbers of workers, under other strategies


def test_the_shared_model_is_the_average(tmp_path: Path) -> None:
    """Saved on 3 ranks in the middle of a period, loaded on 2."""
    sync = Local(every=3)
    ends = run_world(3, Script((1, 1)), folder=tmp_path, sync=sync)
    assert not torch.equal(ends[0]["model.out.weight"], ends[1]["model.out.weight"])

    def load(run: Run) -> dict[str, Any]:
        model = net(seed=9)
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        run.load()
        return dict(tensors("model", model.state_dict()))

    with pytest.warns(UserWarning, match="saved on 3 workers, resumed on 2"):
        loaded = run_world(2, load, folder=tmp_path, sync=sync)
    for name, value in loaded[0].items():
        assert torch.equal(loaded[1][name], value), name
        mean = torch.stack([end[name].double() for end in ends]).mean(0)
        if "seen" not in name and "tracked" not in name:  # other buffers are each rank's own
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["diloco:every=2", "local:every=2,momentum=0.5"])
def test_an_outer_optimizer_begins_where_the_loaded_model_is(text: str, tmp_path: Path) -> None:
    """Not where the model was when it was distributed."""

    def body(run: Run, load: bool) -> dict[str, Any]:
        model = net(seed=9 if load else 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped, _ = run.distribute(model, optimizer)
        if load:
            run.load()
        x, y = data().tensors
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        return dict(tensors("model", model.state_dict()))

    def save(run: Run) -> None:
        model = net()
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        run.save()

    sync = parse(text)
    run_world(3, save, folder=tmp_path, sync=sync)
    with pytest.warns(UserWarning, match="saved on 3 workers, resumed on 2"):
        loaded = run_world(2, lambda run: body(run, True), folder=tmp_path, sync=sync)
    begun = run_world(2, lambda run: body(run, False), folder=tmp_path / "other", sync=sync)
    for name, value in begun[0].items():
        assert torch.equal(loaded[0][name], value), name


def test_a_checkpoint_of_local_sgd_is_one_of_all_reduce(tmp_path: Path) -> None:
    run_world(3, Script((1, 1)), folder=tmp_path, sync=Local(every=3))
    with pytest.warns(UserWarning, match="saved under local:every=3, resumed under allreduce"):
        ends = run_world(3, Script(load=True), folder=tmp_path)
    assert all(torch.equal(end["model.out.weight"], ends[0]["model.out.weight"]) for end in ends)


@pytest.mark.parametrize(("save_at", "own"), [((1, -1), False), ((1, 0), True)])
def test_where_the_ranks_are_in_step_the_model_is_saved_once(
    save_at: tuple[int, int], own: bool, tmp_path: Path
) -> None:
    run_world(2, Script(save_at), folder=tmp_path, sync=Local(every=3))
    checkpoint = newest(tmp_path / "world" / "checkpoints")
    assert checkpoint is not None
    for rank in range(2):
        assert ("model" in read(checkpoint)[f"rank-{rank}"]["sync"][0]) == own

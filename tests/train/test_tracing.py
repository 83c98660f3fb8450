"""What a run tells its trace, and that it tells nothing and hooks nothing without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from farandole.comm import Exchange, Group, InProcess
from farandole.data import Loader
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.trace.spans import NO_TRACE, Trace
from farandole.train import Run
from farandole.train.settings import Settings
from farandole.train.tracing import start_tracing


class Said:
    """A trace that remembers, as `name(` and `)`, the order in which spans begin and end."""

    def __init__(self) -> None:
        self.text = ""

    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[None]:
        return self._told(f"{name}(")

    @contextmanager
    def _told(self, begin: str) -> Iterator[None]:
        self.text += begin
        yield
        self.text += ")"

    def take(self) -> str:
        said, self.text = self.text, ""
        return said


def alone(folder: Path, trace: Trace) -> Run:
    group = Group(InProcess(Exchange(1), 0), trace=trace)
    settings = Settings(name="alone", folder=folder, script="test")
    return Run(group, group.topology, torch.device("cpu"), settings=settings)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def run(tmp_path: Path, said: Said) -> Run:
    return alone(tmp_path, said)


def linear(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_training_step(run: Run, said: Said) -> None:
    model, opt = linear(run)
    said.take()
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        assert said.take() == "forward()backward()optimizer step()"


def test_without_gradients_there_is_no_backward(run: Run, said: Said) -> None:
    model, _ = linear(run)
    said.take()
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert said.take() == "forward()"


def test_accumulating_has_as_many_backwards_as_there_were(run: Run, said: Said) -> None:
    model, _ = linear(run)
    said.take()
    x = torch.ones(1, 3)
    (model(x) + model(x)).sum().backward()
    assert said.take() == "forward()forward()backward()"
    first, second = model(x), model(x)
    first.sum().backward()
    second.sum().backward()
    assert said.take() == "forward()forward()backward()backward()"


def test_two_models_in_one_backward(run: Run, said: Said) -> None:
    generator, _ = linear(run)
    discriminator = run.distribute(nn.Linear(2, 1))
    said.take()
    discriminator(generator(torch.ones(1, 3))).sum().backward()
    assert said.take() == "forward()forward()backward()"


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[dict[str, torch.Tensor]]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(torch.zeros(2), [{"out": self.layer(x)}])


def test_an_output_of_any_shape(run: Run, said: Said) -> None:
    model = run.distribute(Structured())
    said.take()
    model(torch.ones(1, 3)).hidden[0]["out"].sum().backward()
    assert said.take() == "forward()backward()"


def test_an_output_that_is_changed_in_place(run: Run, said: Said) -> None:
    model, _ = linear(run)
    said.take()
    model(torch.ones(1, 3)).mul_(2).add_(1).sum().backward()
    assert said.take() == "forward()backward()"


def test_a_model_that_returns_a_parameter_gets_no_hook_on_it(run: Run, said: Said) -> None:
    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            return self.weight

    model = run.distribute(Itself())
    for _ in range(2):
        model().sum().backward()
    assert not run.unwrap(model).weight._backward_hooks
    assert said.take().endswith("forward()forward()")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no gradient")


def test_an_error_that_the_script_survives(run: Run, said: Said) -> None:
    """In forward, backward and step alike: the next one is told as if nothing had been."""
    model, opt = linear(run)
    said.take()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 4))
    assert said.take() == "forward()"
    with pytest.raises(ArithmeticError):
        model(Fails.apply(torch.ones(1, 3, requires_grad=True))).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    assert said.take() == "forward()backward()forward()backward()"

    def bad_closure() -> float:
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError):
        opt.step(bad_closure)  # type: ignore[arg-type]
    opt.step()
    assert said.take() == "optimizer step()optimizer step()"


def test_a_copy_of_the_model_still_works(run: Run, said: Said) -> None:
    """As for an average of weights: copying must not copy what the hooks lead to."""
    model, _ = linear(run)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_model_that_is_compiled_afterwards(run: Run, said: Said) -> None:
    model, _ = linear(run)
    compiled = torch.compile(model, backend="eager")
    said.take()
    for _ in range(2):
        compiled(torch.ones(1, 3)).sum().backward()
        assert said.take() == "forward()backward()"


def test_data_and_checkpoints(run: Run, said: Said) -> None:
    linear(run)
    said.take()
    for _ in run.loader(TensorDataset(torch.arange(6)), batch_size=2):
        said.text += "step "
    assert said.take() == "data()step data()step data()step data()"
    for _ in run.loader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=False):
        break
    assert said.take() == "data()"
    run.save()
    run.load()
    told = said.take()
    assert told.startswith("save(")
    assert "load(" in told
    assert told.count("(") == told.count(")")


def test_leaving_a_loader_ends_its_epoch_as_ever(run: Run) -> None:
    loader = run.loader(TensorDataset(torch.arange(6)), batch_size=2)
    for _ in loader:
        break
    assert (loader.epoch, loader.done_samples) == (1, 0)


def train(run: Run) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 8, generator=generator), torch.randint(4, (24,), generator=generator)
    )
    for _ in run.epochs(2):
        for x, y in run.loader(data, batch_size=5):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    return list(run.unwrap(model).state_dict().values())


def test_a_trace_changes_no_bit(tmp_path: Path, said: Said) -> None:
    plain = train(alone(tmp_path, NO_TRACE))
    traced = train(alone(tmp_path, said))
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert said.text.count("backward()") == 10


def test_without_a_trace_nothing_is_installed(tmp_path: Path) -> None:
    run = alone(tmp_path, NO_TRACE)
    model, opt = linear(run)
    output = model(torch.ones(1, 3))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(opt._optimizer_step_pre_hooks) == 1  # which looks whether gradients are finite
    assert not opt._optimizer_step_post_hooks
    assert type(run.loader(TensorDataset(torch.arange(2)), batch_size=1)) is Loader
    output.sum().backward()


def test_none_is_asked_for(tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        return start_tracing(Settings(), run.group) is None and run.group.trace is NO_TRACE

    assert run_world(2, body, folder=tmp_path) == [True, True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["trace.txt", "folder.json", "file/trace.json"])
def test_every_rank_is_told_that_a_trace_cannot_be_written(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()

    def body(run: Run) -> str:
        with pytest.raises(UserError) as told:
            start_tracing(Settings(trace=tmp_path / where), run.group)
        return str(told.value)

    first, second = run_world(2, body, folder=tmp_path, timeout=timedelta(seconds=20))
    assert first == second
    assert str(tmp_path / where).removesuffix(".txt") in first


def test_every_rank_is_told_when_one_cannot_write_its_part(tmp_path: Path) -> None:
    (tmp_path / "parts" / "rank-1.jsonl").mkdir(parents=True)

    def body(run: Run) -> str:
        with pytest.raises(UserError) as told:
            start_tracing(Settings(trace_parts=tmp_path / "parts"), run.group)
        return str(told.value)

    for told in run_world(2, body, folder=tmp_path, timeout=timedelta(seconds=20)):
        assert told.startswith("rank 1 on localhost cannot write its part of the trace: ")


def test_the_settings_come_from_the_environment() -> None:
    said = {"FARANDOLE_TRACE": "out.json", "FARANDOLE_TRACE_PARTS": "/parts"}
    found = Settings.from_environ(said)
    assert (found.trace, found.trace_parts) == (Path("out.json"), Path("/parts"))
    assert Settings.from_environ(dict.fromkeys(said, "")) == Settings()

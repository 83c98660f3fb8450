"""The model that is trained is the script's own object, whatever of it is called."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.sync import AllReduce, parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train.run import Run

BATCH = 4


class Coder(nn.Module):
    """Has methods of its own, a part that some batches do not use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        # Before BatchNorm a bias has a gradient of rounding errors alone, which Adam would blow up.
        first = nn.Linear(5, 8, bias=False)
        self.encoder = nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh())
        self.extra = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 5)
        self.never = nn.Linear(8, 8)
        self.uses_extra = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        return hidden + self.extra(hidden) if self.uses_extra else hidden

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(code)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


@functools.cache
def _drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """Once: all ranks of a world share torch's random state."""
    torch.manual_seed(3)
    return make().double()


def coder() -> Coder:
    model: Coder = copy.deepcopy(_drawn(Coder))  # type: ignore[assignment]
    return model


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)


def plainly(model: Coder, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x)


def by_methods(model: Coder, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model.decode(model.encode(x)), x)


def by_submodules(model: Coder, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model.decoder(model.encoder(x)), x)


def under_a_checkpoint(model: Coder, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(checkpoint(model, x, use_reentrant=False), x)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # Weight decay would move a parameter that has a gradient of zeros, and not one that has none.
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def draw_first() -> None:
    coder()
    chain()


Loss = Callable[[Coder, torch.Tensor], torch.Tensor]


def serial(size: int, loss: Loss, steps: int, uses: Callable[[int, int], bool]) -> Coder:
    """One process with the gradients of all ranks. BatchNorm is each rank's own."""
    model = coder()
    optimizer = adam(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            model.uses_extra = uses(rank, step)
            (loss(model, inputs(rank, step)) / size).backward()
        optimizer.step()
    return model


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("loss", [plainly, by_methods, by_submodules, under_a_checkpoint])
@pytest.mark.parametrize("bucket_mib", [None, 0.0001])
def test_whatever_is_called_is_averaged(
    loss: Loss, bucket_mib: float | None, tmp_path: Path
) -> None:
    def body(run: Run) -> Coder:
        model = coder()
        wrapped, optimizer = run.distribute(model, adam(model), sync=AllReduce(bucket_mib))
        assert wrapped is model
        for step in range(4):
            optimizer.zero_grad()
            loss(model, inputs(run.rank, step)).backward()
            optimizer.step()
        return model

    models = run_world(3, body, folder=tmp_path)
    alone = serial(3, loss, 4, lambda rank, step: False)
    assert all(largest_difference(model, alone) < 1e-12 for model in models)
    for model in models:  # one model, its statistics too
        torch.testing.assert_close(model.state_dict(), models[0].state_dict(), rtol=0, atol=0)
        assert model.never.weight.grad is None


@pytest.mark.parametrize("codec", [None, "fp16"])
def test_parts_that_some_ranks_or_none_use(codec: str | None, tmp_path: Path) -> None:
    def uses(rank: int, step: int) -> bool:
        return step == 2 or (step == 3 and rank == 1)

    def body(run: Run) -> tuple[Coder, list[bool]]:
        model = coder()
        _, optimizer = run.distribute(model, adam(model), sync=AllReduce(codec=codec))
        has = []
        for step in range(5):
            optimizer.zero_grad()
            model.uses_extra = uses(run.rank, step)
            plainly(model, inputs(run.rank, step)).backward()
            has.append(model.extra.weight.grad is not None)
            optimizer.step()
        return model, has

    alone = serial(2, plainly, 5, uses)
    for model, has in run_world(2, body, folder=tmp_path):
        assert has == [False, False, True, True, False]
        assert largest_difference(model, alone) < (1e-12 if codec is None else 1e-2)


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_gradients_are_averaged_even_if_the_last_batch_has_none(
    to_none: bool, tmp_path: Path
) -> None:
    def body(run: Run) -> Coder:
        model = coder()
        model.never = nn.Identity()  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer)
        for step in range(4):
            model.uses_extra = step % 2 == 0
            with run.no_sync(model) if step % 2 == 0 else nullcontext():
                plainly(model, inputs(run.rank, step)).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        return model

    alone = coder()
    alone.never = nn.Identity()  # type: ignore[assignment]
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(4):
        alone.uses_extra = step % 2 == 0
        for rank in range(2):
            (plainly(alone, inputs(rank, step)) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    for model in run_world(2, body, folder=tmp_path):
        assert largest_difference(model, alone) < 1e-12


# Reentrant checkpoints: a backward pass inside of another


def four() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))


def chain(count: int = 4) -> nn.Sequential:
    model: nn.Sequential = copy.deepcopy(_drawn(four))[:count]  # type: ignore[index]
    return model


@pytest.mark.parametrize("inside", [(0, 1, 2, 3), (1, 2), (0, 3), (3,)])
def test_reentrant_checkpoints(inside: tuple[int, ...], tmp_path: Path) -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        value = x.clone().requires_grad_()
        for place, layer in enumerate(model):
            again = place in inside
            value = checkpoint(layer, value, use_reentrant=True) if again else layer(value)
        return value.square().mean()

    def body(run: Run) -> nn.Sequential:
        model = chain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.distribute(model, optimizer, sync=AllReduce(bucket_mib=0.0001))
        for step in range(3):
            optimizer.zero_grad()
            forward(model, inputs(run.rank, step)).backward()
            optimizer.step()
        return model

    alone = chain()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (forward(alone, inputs(rank, step)) / 2).backward()
        optimizer.step()
    for model in run_world(2, body, folder=tmp_path):
        assert largest_difference(model, alone) < 1e-12


def test_what_reentrant_checkpoints_do_not_reach_is_named(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = chain(2)
        _, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        x = inputs(run.rank, 0).requires_grad_()
        checkpoint(model[0], x, use_reentrant=True).sum().backward()
        optimizer.step()

    with pytest.raises(
        fd.UserError, match=r"no gradient reached 1\.weight, 1\.bias .*use_reentran"
    ):
        run_world(2, body, folder=tmp_path)


# What cannot be averaged is refused


def twice(model: nn.Sequential, x: torch.Tensor) -> None:
    hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
    model[1](checkpoint(model[0], hidden, use_reentrant=True)).sum().backward()


def differentiable(model: nn.Sequential, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: about a leak
        model(x).square().sum().backward(create_graph=True)


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (twice, r"gradient of '[01]\.(weight|bias)' arrived twice .*use_reentrant=False"),
        (differentiable, r"create_graph=True\) has made a gradient of '[01]\.(weight|bias)'"),
    ],
)
def test_gradients_that_are_refused(
    backward: Callable[[nn.Sequential, torch.Tensor], None], message: str, tmp_path: Path
) -> None:
    def body(run: Run) -> None:
        model = chain(2)
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        backward(model, inputs(run.rank, 0))

    with pytest.raises(fd.UserError, match=message):
        run_world(2, body, folder=tmp_path)


def test_a_failed_backward_pass_is_not_stepped_on_and_can_be_repeated(tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no gradient today")

    def body(run: Run) -> nn.Module:
        model = chain(2)
        _, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        x = inputs(run.rank, 0)
        with pytest.raises(ArithmeticError, match="no gradient today"):
            model[1](Fails.apply(model[0](x))).square().mean().backward()
        with pytest.raises(fd.UserError, match=r"last backward pass has failed.*zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return model

    alone = chain(2)
    for rank in range(2):
        (alone(inputs(rank, 0)).square().mean() / 2).backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    for model in run_world(2, body, folder=tmp_path):
        assert largest_difference(model, alone) < 1e-12


# Parameters that change


@pytest.mark.parametrize("text", ["allreduce", "allreduce:codec=fp16", "lagged:steps=2", "daso"])
def test_parameters_may_be_thawed_and_added(text: str, tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).double())

    def body(run: Run) -> tuple[float, float]:
        model = chain(2)
        model[0].requires_grad_(False)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        before = copy.deepcopy(model)
        for epoch in run.epochs(3):
            for (x,) in run.loader(data, global_batch_size=6):
                if epoch == 1:
                    model[0].requires_grad_(True)
                optimizer.zero_grad()
                loss = (model(x) * (1 + run.rank)).square().mean()
                loss.backward()
                run.observe_loss(loss)
                optimizer.step()
        assert run.check_in_step(model)
        return largest_difference(model[0], before[0]), largest_difference(model[1], before[1])

    hosts = Topology.declared([1, 1])
    for thawed, trained in run_world(2, body, folder=tmp_path, sync=parse(text), topology=hosts):
        assert thawed > 1e-4
        assert trained > 1e-4


# What others do with the model


STRATEGIES = ["allreduce", "allreduce:batchnorm=sync", "lagged", "local:every=2", "daso"]


@pytest.mark.parametrize("text", STRATEGIES)
def test_the_model_can_be_saved_whole_copied_and_called_alone(text: str, tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = coder()
        _, optimizer = run.distribute(model, adam(model))
        data = TensorDataset(torch.cat([inputs(0, step) for step in range(6)]))
        for _ in run.epochs(2):
            for (x,) in run.loader(data, global_batch_size=BATCH):
                optimizer.zero_grad()
                loss = plainly(model, x)
                loss.backward()
                run.observe_loss(loss)
                optimizer.step()
        assert type(model) is Coder
        if run.rank == 0:  # nobody is waited for
            file = io.BytesIO()
            torch.save(model, file)
            if "sync" not in text:  # else it holds our layers
                assert b"farandole" not in file.getvalue()
            file.seek(0)
            for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
                other.eval()
                model.eval()
                x = inputs(9, 9)
                assert torch.equal(other(x), model(x))
                assert torch.equal(other.decode(other.encode(x)), model(x))

    hosts = Topology.declared([1, 1])
    run_world(2, body, folder=tmp_path, sync=parse(text), topology=hosts)


def test_a_wrapper_around_the_model_is_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = chain(1)
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        theirs = DistributedDataParallel(model, process_group=run.group.process_group)
        if run.rank == 0:  # torch notes whose forward pass it is once for all threads
            theirs(inputs(run.rank, 0))

    with pytest.raises(fd.UserError, match=r"was put around the model.*hide_from_lib"):
        run_world(2, body, folder=tmp_path, sync=parse("local:every=2"))


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
        run.distribute(model)

    with pytest.raises(fd.UserError, match=r"its part '0' is a DataParallel.*the plain model"):
        run_world(2, body, folder=tmp_path)


# Uneven batches


def test_gradients_that_are_not_added_up_are_not_weighed(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double())

    def body(run: Run) -> bool:
        model = chain(1)
        run.distribute(model)
        for (x,) in run.loader(data, global_batch_size=3, shuffle=False):
            (asked,) = torch.autograd.grad(model(x).sum(), model[0].bias)
            model(x).sum().backward()
        return bool((asked == len(x)).all())

    assert run_world(2, body, folder=tmp_path) == [True, True]


# After each epoch


def train_and_change(run: Run, by: float, **options: Any) -> None:
    run._session.models._checks_in_step = options.get("check", True)
    model = chain(1)
    _, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.ones(8, 5, dtype=torch.float64))
    for _ in run.epochs(1):
        for (x,) in run.loader(data, global_batch_size=4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            run.observe_loss(loss)
            optimizer.step()
        if run.rank == 1:
            with torch.no_grad():
                model[0].bias[2] += by
        for _batch in run.loader(data, global_batch_size=4):
            optimizer.zero_grad()


def test_ranks_that_drift_apart_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(
        fd.ModelMismatchError,
        match=r"after 4 steps .*0\.bias \(ranks \[1\]\).*check_in_step=False",
    ):
        run_world(2, lambda run: train_and_change(run, 0.5), folder=tmp_path)


def test_differences_of_rounding_are_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="after 4 steps the parameters .*as .*rounding may do"):
        run_world(2, lambda run: train_and_change(run, 1e-9), folder=tmp_path)


def test_the_check_can_be_left_out(tmp_path: Path) -> None:
    run_world(2, lambda run: train_and_change(run, 0.5, check=False), folder=tmp_path)


def test_a_script_leaves_it_out_by_an_argument_of_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fd.init() as checking, fd.init(check_in_step=False) as not_checking:
        assert checking._session.models._checks_in_step
        assert not not_checking._session.models._checks_in_step


def test_ranks_that_never_meet_are_not_compared(tmp_path: Path) -> None:
    sync = parse("local:every=1000,meet_epochs=no")
    run_world(2, lambda run: train_and_change(run, 0.5), folder=tmp_path, sync=sync)

"""Hogwild: one model in one memory, against plain PyTorch; what it refuses and goes on from.

No two lock-free runs are the same. Where a test compares bits, either no two ranks touch the same
number, or they take their steps in turns.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from farandole.comm import Exchange, Group, InProcess
from farandole.comm.transports.shm.segment import Segment
from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.errors import CommError, DivergedError, UserError
from farandole.sync import AllReduce, Hogwild, Strategy, parse
from farandole.sync.hogwild.shared_parameters import SharedParameters
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from tests.conftest import Sandbox
from tests.support.standstill import wait_until_asleep

EPOCHS, BATCH, COUNT = 3, 12, 43  # the last batch is uneven between ranks
RATE, FALL = 0.1, 0.6
MakeOptimizer = Callable[[nn.Module], Optimizer]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Without torch's own generator, which all ranks of a world share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def mlp(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), seed)


def normed(seed: int = 0) -> nn.Module:
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return seeded(nn.Sequential(*layers).double(), seed)


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), RATE, eps=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), torch.tensor(RATE), eps=1e-3, weight_decay=0.1)


def result(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """All that training has changed."""
    moments = {
        f"{index}.{name}": value.clone()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    return {**{k: v.clone() for k, v in model.state_dict().items()}, **moments}


def in_turns(run: Run, step: Callable[[], Any]) -> None:
    """All gradients are computed before the first step, and ranks step one after another."""
    for rank in range(run.size):
        run.group.barrier()
        if rank == run.rank:
            step()
    run.group.barrier()


class Script:
    """Trains in turns; saves at `save_at`, an epoch and a step, and stops; or loads and goes on."""

    def __init__(
        self,
        make: Callable[[int], nn.Module] = mlp,
        optimizer: MakeOptimizer = sgd,
        *,
        save_at: tuple[int, int] | None = None,
        load: bool = False,
        distribute: bool = True,
    ) -> None:
        self.make, self.optimizer = make, optimizer
        self.save_at, self.load, self.distribute = save_at, load, distribute

    def __call__(self, run: Run) -> dict[str, torch.Tensor]:
        model = self.make(9 * self.load + run.rank)  # rank 0's counts
        optimizer = self.optimizer(model)
        wrapped = run.distribute(model, optimizer)[0] if self.distribute else model
        scheduler = StepLR(optimizer, 1, FALL)
        state = run.load() if self.load else None
        if state is not None:
            scheduler.load_state_dict(state["scheduler"])
        source = data()
        for epoch in run.epochs(EPOCHS):
            for step, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                in_turns(run, optimizer.step)
                if self.save_at == (epoch, step):
                    run.save(scheduler=scheduler.state_dict())
                    return result(model, optimizer)
            scheduler.step()
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(
                RATE * FALL ** (epoch + 1)
            )
            assert not self.distribute or run.check_in_step(wrapped)
            if self.save_at == (epoch, -1):
                run.save(scheduler=scheduler.state_dict())
                return result(model, optimizer)
        return result(model, optimizer)


def simulated(size: int, make_optimizer: MakeOptimizer, share: float) -> dict[str, torch.Tensor]:
    """One plain model, and an optimizer for each rank, at `share` of the rate."""
    model = mlp()
    optimizers = [make_optimizer(model) for _ in range(size)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * share
    parameters = list(model.parameters())
    shares = Shares(COUNT, size, BATCH)
    x, y = data().tensors
    for epoch in range(EPOCHS):
        order = torch.tensor(shuffled(COUNT, 0, epoch))
        for step in range(shares.steps):
            gradients = []
            for rank in range(size):
                part = order[list(shares.share(step, rank))]
                loss = F.cross_entropy(model(x[part]), y[part]) * shares.share_weight(step, rank)
                gradients.append(torch.autograd.grad(loss, parameters))
            for optimizer, mine in zip(optimizers, gradients, strict=True):
                for parameter, gradient in zip(parameters, mine, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * FALL
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in mlp().named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found[name], value), f"{name} has not been trained"


# What a step does


@pytest.mark.parametrize("optimizer", [sgd, adam, adamw])
def test_one_worker_is_plain_training_to_the_bit(optimizer: MakeOptimizer, tmp_path: Path) -> None:
    (ours,) = run_world(1, Script(normed, optimizer), folder=tmp_path, sync=Hogwild())
    (plain,) = run_world(1, Script(normed, optimizer, distribute=False), folder=tmp_path)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


@pytest.mark.parametrize("optimizer", [sgd, adam, adamw])
@pytest.mark.parametrize("rate", ["share", "whole"])
def test_each_rank_steps_on_its_own_gradient(
    optimizer: MakeOptimizer, rate: str, tmp_path: Path
) -> None:
    sync = parse(f"hogwild:rate={rate}")
    ranks = run_world(3, Script(mlp, optimizer), folder=tmp_path, sync=sync)
    expected = simulated(3, optimizer, 1 / 3 if rate == "share" else 1.0)
    for found in ranks:
        assert_close(found, expected)


def test_in_turns_it_is_all_reduce(tmp_path: Path) -> None:
    """So one learning rate means the same under both."""
    ours = run_world(3, Script(mlp, plain_sgd), folder=tmp_path, sync=Hogwild())
    theirs = run_world(3, Script(mlp, plain_sgd), folder=tmp_path, sync=AllReduce())
    assert_close(ours[1], theirs[1])


def test_the_script_sees_its_own_rate_and_gradient(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), torch.tensor(RATE))
        wrapped, _ = run.distribute(model, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        wrapped(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate == torch.tensor(RATE)
        assert torch.equal(model.weight.grad, torch.ones(1, 2))  # type: ignore[arg-type]

    run_world(2, body, folder=tmp_path, sync=Hogwild())


def test_a_step_that_failed_leaves_the_rate_to_the_next(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        run.distribute(model, optimizer)

        def fail() -> float:
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            optimizer.step(fail)
        with torch.no_grad():
            model.weight.zero_()
        model.weight.grad = torch.ones(1, 1)
        in_turns(run, optimizer.step)
        assert model.weight.item() == pytest.approx(-RATE)  # two steps at half the rate
        assert optimizer.param_groups[0]["lr"] == RATE

    run_world(2, body, folder=tmp_path, sync=Hogwild())


# One memory

ROWS, WIDTH, ROUNDS = 40, 4, 200


def table() -> nn.Embedding:
    model = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    return seeded(model)  # type: ignore[return-value]


def train_rows(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Only every second row, each rank others, and without ever waiting for the other."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(ROUNDS):
        rows = torch.randint(ROWS // 2, (8,), generator=generator) * 2 + rank
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()


def trained_alone() -> torch.Tensor:
    """Each rank's rows as they are without the other rank."""
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank in range(2):
        model = table()
        train_rows(model, torch.optim.SGD(model.parameters(), 0.01 / 2), rank)
        rows[rank::2] = model.weight.detach()[rank::2]
    return rows


def test_updates_of_disjoint_rows_add_up_exactly(tmp_path: Path) -> None:
    def body(run: Run) -> torch.Tensor:
        model = table()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        wrapped, _ = run.distribute(model, optimizer)
        train_rows(wrapped, optimizer, run.rank)
        run.group.barrier()
        return model.weight.detach().clone()

    for found in run_world(2, body, folder=tmp_path, sync=Hogwild()):
        assert torch.equal(found, trained_alone())


def test_what_one_rank_writes_the_others_read_at_once(tmp_path: Path) -> None:
    written, read = threading.Event(), threading.Event()

    def body(run: Run) -> None:
        model = nn.Linear(2, 2)
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        if run.rank == 0:
            with torch.no_grad():
                model.weight.fill_(7.0)
            written.set()
            assert read.wait(150)
        else:
            assert written.wait(150)
            assert torch.equal(model.weight, torch.full((2, 2), 7.0))
            read.set()

    run_world(2, body, folder=tmp_path, sync=Hogwild())


class Odd(nn.Module):
    """Tied, turned, complex, empty, 0-d, frozen and single-precision parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.three = nn.Linear(3, 3)
        self.three.weight.data = self.one.weight.data  # another parameter in the same memory
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.still = nn.Parameter(torch.randn(7, dtype=torch.bfloat16), requires_grad=False)


def test_any_parameter_moves_as_it_is(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = Odd()
        strides = [parameter.stride() for parameter in model.parameters()]
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        assert [parameter.stride() for parameter in model.parameters()] == strides
        assert run.check_in_step(model)
        assert model.three.weight.data_ptr() == model.one.weight.data_ptr()
        run.group.barrier()
        if run.rank == 1:
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(number)
        run.group.barrier()
        aliases = {id(model.one.weight): id(model.three.weight)}
        last = {id(p): number for number, p in enumerate(model.parameters())}
        for parameter in model.parameters():
            wanted = last[aliases.get(id(parameter), id(parameter))]
            assert torch.equal(parameter, torch.full_like(parameter, wanted))

    run_world(2, body, folder=tmp_path, sync=Hogwild())


def memories() -> int:
    """How many of ours this process holds."""
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd:farandole" in str(link.readlink()) for link in links)


def test_the_memory_goes_with_the_model(tmp_path: Path) -> None:
    gc.collect()
    before = memories()
    held: list[nn.Module] = []

    def body(run: Run) -> None:
        model = nn.Linear(2, 2)
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        held.append(model)

    run_world(2, body, folder=tmp_path, sync=Hogwild())
    assert memories() > before
    held.clear()
    gc.collect()
    assert memories() == before


# Passes over the data


def test_ranks_are_in_step_after_each_pass_whatever_steps_were_skipped(tmp_path: Path) -> None:
    def body(run: Run) -> list[bool]:
        model = normed()
        wrapped, optimizer = run.distribute(model, sgd(model))
        source, in_step = data(), []
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader(source, global_batch_size=BATCH):
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                if run.steps % 3 != run.rank:
                    optimizer.step()
            in_step.append(bool(run.check_in_step(wrapped)))
        return in_step

    ended = run_world(3, body, folder=tmp_path, sync=Hogwild())
    assert ended == [[True] * EPOCHS] * 3


def test_statistics_are_averaged_at_the_end_of_a_pass(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        model = normed()
        wrapped, _ = run.distribute(model, sgd(model))
        for x, _ in run.loader(data(), global_batch_size=BATCH):
            wrapped(x)
            own = model[1].running_mean.clone()  # type: ignore[index, operator, union-attr]
        return own, model[1].running_mean  # type: ignore[index, return-value]

    ranks = run_world(3, body, folder=tmp_path, sync=Hogwild())
    mean = torch.stack([own for own, _ in ranks]).mean(0)
    for own, after in ranks:
        torch.testing.assert_close(after, mean)
        assert not torch.allclose(own, mean)


def test_nobody_steps_while_another_still_evaluates(tmp_path: Path) -> None:
    happened: list[str] = []
    other: queue.Queue[int] = queue.Queue()

    def body(run: Run) -> None:
        model = mlp()
        wrapped, optimizer = run.distribute(model, sgd(model))
        source = data()
        for epoch in run.epochs(2):
            if epoch == 1 and run.rank == 1:
                other.put(threading.get_native_id())
            if epoch == 1 and run.rank == 0:
                wait_until_asleep(os.getpid(), [other.get(timeout=150)])  # or it has stepped by now
                happened.append("evaluated")
            for x, y in run.loader(source, global_batch_size=BATCH):
                F.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                if epoch == 1:
                    happened.append("stepped")

    run_world(2, body, folder=tmp_path, sync=Hogwild())
    assert happened[0] == "evaluated"
    assert "stepped" in happened


# What is not finite


def ill_at(run: Run, kind: str, optimizer_of: Callable[[Any], Optimizer]) -> nn.Module:
    """Three steps; rank 1's second has a gradient of NaN."""
    sparse = kind == "sparse"
    model = nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(2, 2)
    optimizer = optimizer_of(model.parameters())
    run.distribute(model, optimizer)
    for step in range(3):
        factor = float("nan") if (run.rank, step) == (1, 1) else 1.0

        def compute(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.tensor([1, 2]) if sparse else torch.ones(1, 2)
            loss = model(x).sum() * factor
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()
        run.group.barrier()
    return model


@pytest.mark.parametrize("kind", ["dense", "sparse", "closure"])
def test_a_gradient_that_is_not_finite_reaches_nobody(kind: str, tmp_path: Path) -> None:
    weights: list[torch.Tensor] = []

    def body(run: Run) -> None:
        def optimizer_of(parameters: Any) -> Optimizer:
            parameters = list(parameters)
            weights.append(parameters[0])
            return torch.optim.SGD(parameters, 0.1)

        ill_at(run, kind, optimizer_of)

    with pytest.raises(DivergedError, match=r"rank 1, step 2: its gradient of '(weight|bias)'"):
        run_world(2, body, folder=tmp_path, sync=Hogwild())
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_what_a_scaler_skips_is_no_error(tmp_path: Path) -> None:
    def body(run: Run) -> torch.Tensor:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        wrapped, _ = run.distribute(model, optimizer)
        before = model.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(wrapped(torch.ones(1, 2)).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        return model.weight.detach() - before

    for moved in run_world(2, body, folder=tmp_path, sync=Hogwild()):
        assert torch.equal(moved, torch.zeros(2, 2))


# What it refuses


def distribute(run: Run) -> None:
    model = nn.Linear(2, 2)
    run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def test_several_hosts_are_refused(tmp_path: Path) -> None:
    said = r"the 3 ranks are on 2: host-0: 0-1, host-1: 2\. Use `local` or `server:async`"
    with pytest.raises(UserError, match=said):
        run_world(
            3, distribute, folder=tmp_path, sync=Hogwild(), topology=Topology.declared([2, 1])
        )


def test_other_memory_than_that_of_cpus_is_refused() -> None:
    """`meta` stands for a GPU: these tests have none."""
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UserError, match=r"'weight' is on meta\. Hide the GPUs"):
        Hogwild().build(model, optimizer, Group(InProcess(Exchange(1), 0, Topology.single(1))))


def test_it_needs_the_optimizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hogwild counts the optimizer's steps and was given none"):
        run_world(1, lambda run: run.distribute(mlp()), folder=tmp_path, sync=Hogwild())


def replace_data(model: nn.Linear, optimizer: Optimizer) -> None:
    model.bias.data = model.bias.data.clone()


def move_elsewhere(model: nn.Linear, optimizer: Optimizer) -> None:
    model.double()


def add_to_the_optimizer(model: nn.Linear, optimizer: Optimizer) -> None:
    added = nn.Parameter(torch.ones(5))
    added.grad = torch.ones(5)
    optimizer.add_param_group({"params": [added]})


def replace_in_the_model(model: nn.Linear, optimizer: Optimizer) -> None:
    model.bias = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_data, "the parameter 'bias' has left the memory"),
        (move_elsewhere, "the parameter 'weight' has left the memory"),
        (add_to_the_optimizer, r"a parameter of shape \(5,\) is trained that was not in the model"),
        (replace_in_the_model, r"a parameter of shape \(2,\) is trained that was not"),
    ],
)
def test_parameters_that_are_replaced_or_added_are_noticed(
    change: Callable[[nn.Linear, Optimizer], None], said: str, tmp_path: Path
) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(2, 2)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        change(model, optimizer)
        for (x,) in run.loader(TensorDataset(torch.ones(4, 2)), batch_size=2):
            wrapped(x.to(model.weight.dtype)).sum().backward()
            optimizer.step()

    with pytest.raises(UserError, match=said):
        run_world(2, body, folder=tmp_path, sync=Hogwild())


def test_two_models_with_one_optimizer_are_refused(tmp_path: Path) -> None:
    """Else each would take its share of the other's share of the rate."""

    def body(run: Run) -> None:
        first, second = nn.Linear(2, 2), nn.Linear(2, 3)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
        one, _ = run.distribute(first, optimizer)
        other, _ = run.distribute(second, optimizer)
        other(one(torch.ones(1, 2))).sum().backward()
        optimizer.step()

    with pytest.raises(UserError, match="give each model an optimizer of its own"):
        run_world(2, body, folder=tmp_path, sync=Hogwild())


def cannot_open(pid: int, descriptor: int, length: int) -> Segment:
    raise PermissionError(13, "Permission denied")


def open_another(pid: int, descriptor: int, length: int) -> Segment:
    return Segment.make(length, length)


@pytest.mark.parametrize(
    ("open_it", "said"),
    [(cannot_open, "Permission denied"), (open_another, "it is another process here")],
)
def test_ranks_that_cannot_reach_the_memory_say_so_on_all(
    open_it: Callable[[int, int, int], Segment],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Segment, "open", open_it)

    def body(run: Run) -> str:
        with pytest.raises(CommError) as raised:
            SharedParameters(nn.Linear(2, 2), run.group)
        return str(raised.value)

    for message in run_world(2, body, folder=tmp_path):
        assert message.startswith("rank 1 cannot open the shared memory of process")
        assert said in message


@pytest.mark.parametrize("strategy", [Hogwild(), Hogwild(rate="whole")])
def test_text_and_back(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy


def test_a_rate_that_is_no_choice() -> None:
    with pytest.raises(UserError, match=r"hogwild: rate='hole' is not a choice.*'whole'"):
        Hogwild(rate="hole")  # type: ignore[arg-type]


# Checkpoints


@pytest.mark.parametrize("save_at", [(0, 1), (1, 0), (1, -1)], ids=str)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_resumed_run_goes_on_to_the_bit(
    optimizer: MakeOptimizer, save_at: tuple[int, int], tmp_path: Path
) -> None:
    """As far as a run can, that takes its steps in turns."""

    def world(script: Script, folder: str) -> list[dict[str, torch.Tensor]]:
        return run_world(3, script, folder=tmp_path / folder, sync=Hogwild())

    whole = world(Script(normed, optimizer), "whole")
    world(Script(normed, optimizer, save_at=save_at), "stopped")
    resumed = world(Script(normed, optimizer, load=True), "stopped")
    for rank, (expected, found) in enumerate(zip(whole, resumed, strict=True)):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"rank {rank}: {name}"
    apart = [name for name, value in whole[0].items() if not torch.equal(whole[1][name], value)]
    assert apart, "the ranks have nothing of their own that could get lost"


def test_a_checkpoint_holds_one_model_for_any_number_of_workers(tmp_path: Path) -> None:
    ends = run_world(3, Script(normed, save_at=(1, 0)), folder=tmp_path, sync=Hogwild())

    def load(run: Run) -> dict[str, torch.Tensor]:
        model = normed(9)
        optimizer = sgd(model)
        run.distribute(model, optimizer)
        run.load()
        return result(model, optimizer)

    with pytest.warns(UserWarning, match="saved on 3 workers, resumed on 2"):
        loaded = run_world(2, load, folder=tmp_path, sync=Hogwild())
    for name, value in normed().named_parameters():
        assert torch.equal(loaded[1][name], ends[0][name])
        assert not torch.equal(loaded[1][name], value)
    mean = torch.stack([end["1.running_mean"] for end in ends]).mean(0)
    torch.testing.assert_close(loaded[0]["1.running_mean"], mean)
    assert not torch.equal(ends[0]["1.running_mean"], mean), "saving has changed a rank's own"


# Real processes

PROCESSES = """
import json, sys
from pathlib import Path
import torch
import farandole as fd
sys.path[:0] = sys.argv[2:]
import conform
from test_hogwild import table, train_rows

run = fd.init(timeout=150)
found = {"transport": run.group.transport.name}
model = table()
wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
train_rows(wrapped, optimizer, run.rank)
run.group.barrier()
found["rows"] = model.weight.tolist()
outcome = conform.train(run, None)
found["accuracy"], found["in_step"] = outcome.accuracy, outcome.in_step
(Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps(found))
"""


def test_processes_share_one_memory(
    sandbox: Sandbox, two_ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    here = Path(__file__).parent
    script = sandbox.script("processes.py", PROCESSES)
    ranks = [rank | {"FARANDOLE_SYNC": "hogwild"} for rank in two_ranks]
    for end in sandbox.by_hand(ranks, script, tmp_path, here, here.parent / "scripts"):
        assert end.returncode == 0, end.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert found["rows"] == trained_alone().tolist()
        assert found["transport"] == "shm"
        assert all(found["in_step"])
        assert found["accuracy"] > 0.95

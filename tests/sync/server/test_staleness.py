"""The strategy `server` against plain PyTorch: the same updates, bounds that hold, what it refuses.

In `bsp` the servers take the mean of all gradients, so that one plain model on the whole batch is
the oracle. In the stale modes no two runs are the same. There a loss whose gradient is the same
everywhere is the oracle: whatever the order of the updates, none may be lost and none count twice.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.errors import CommError, DivergedError, UserError
from farandole.sync import AllReduce, Local, Server, Strategy, parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from tests.support.standstill import wait_until_asleep

Tensors = dict[str, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]


# Models and optimizers


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Odd(nn.Module):
    """Complex, empty, 0-d, unused, tied and single-precision parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.turn = nn.Parameter(torch.zeros(3, 6, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0, 2, dtype=torch.float16))
        self.never = nn.Parameter(torch.zeros(2))
        self.single = nn.Parameter(torch.zeros(3))
        self.same = self.single

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.to(torch.complex128) @ self.turn.T).abs() * self.scale.exp()
        return hidden + self.single.double() + self.same.double() + self.nothing.double().sum()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Without torch's own generator, which all ranks of a world share."""
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            real.copy_(torch.randn(real.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def sgd(**options: Any) -> MakeOptimizer:
    return lambda model: torch.optim.SGD(model.parameters(), 0.1, **options)


def in_groups(model: nn.Module) -> Optimizer:
    """Every parameter at a rate and a momentum of its own."""
    groups = [
        {"params": [parameter], "lr": 0.1 / (index + 1), "momentum": 0.2 * index}
        for index, parameter in enumerate(model.parameters())
    ]
    return torch.optim.SGD(groups, 0.1)


# A large eps: where a gradient is nearly 0, Adam turns its last bit into a whole step.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd(),
    "momentum": sgd(momentum=0.9, dampening=0.1),
    "nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "groups": in_groups,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.05, eps=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.02, eps=1e-3),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 0.02, eps=1e-3, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3),
}
SGD = OPTIMIZERS["momentum"]


# The same job twice: under Farandole and by hand


@dataclasses.dataclass(frozen=True)
class Job:
    size: int = 2
    count: int = 31  # the last batch is small, and uneven between ranks
    batch: int = 12
    epochs: int = 2
    model: Callable[[], nn.Module] = mlp
    optimizer: MakeOptimizer = SGD
    fall: float = 0.7  # of the rate, after each epoch
    accumulate: int = 1
    closure: bool = False
    evaluate: bool = False  # in the middle of each epoch
    stop_after: int | None = None  # so many batches of an epoch
    own_loader: bool = False

    @property
    def shares(self) -> Shares:
        return Shares(self.count, self.size, self.batch)

    @property
    def steps(self) -> int:
        return min(self.shares.steps, self.stop_after or self.shares.steps)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.count, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(3, (self.count,), generator=generator))

    def is_step(self, batch: int) -> bool:
        return (batch + 1) % self.accumulate == 0 or batch == self.steps - 1

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        x = x.to(dtype) if dtype == torch.bfloat16 else x
        return F.cross_entropy(model(x), y) / self.accumulate


def plain(job: Job) -> Tensors:
    """One model, on the batches of all ranks."""
    model = seeded(job.model)
    optimizer = job.optimizer(model)
    scheduler = ExponentialLR(optimizer, job.fall)
    x, y = job.data().tensors
    for epoch in range(job.epochs):
        order = torch.tensor(shuffled(job.count, 0, epoch))
        for batch in range(job.steps):
            everyones = [i for rank in range(job.size) for i in job.shares.share(batch, rank)]
            chosen = order[everyones]
            job.loss(model, x[chosen], y[chosen]).backward()
            if job.is_step(batch):
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return state_of(model)


def train(run: Run, job: Job) -> Tensors:
    model = seeded(job.model, seed=run.rank)  # rank 0's counts
    optimizer = job.optimizer(model)
    wrapped, _ = run.distribute(model, optimizer)
    scheduler = ExponentialLR(optimizer, job.fall)
    data = job.data()
    for _ in run.epochs(job.epochs):
        for batch, (x, y) in enumerate(run.loader(data, global_batch_size=job.batch)):
            if job.evaluate and run.rank == 0:
                with torch.no_grad():
                    wrapped.eval()(data.tensors[0])
                wrapped.train()
            if job.closure:
                optimizer.step(lambda x=x, y=y: backward(optimizer, job.loss(wrapped, x, y)))
            else:
                with nullcontext() if job.is_step(batch) else run.no_sync(wrapped):
                    job.loss(wrapped, x, y).backward()
                if job.is_step(batch):
                    optimizer.step()
                    optimizer.zero_grad()
            if batch + 1 == job.stop_after:
                break
        scheduler.step()
        assert run.check_in_step(wrapped)
    return state_of(model)


def backward(optimizer: Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    return loss


def state_of(model: nn.Module) -> Tensors:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(job: Job, sync: Strategy | str, folder: Path) -> list[Tensors]:
    sync = parse(sync) if isinstance(sync, str) else sync
    return run_world(job.size, lambda run: train(run, job), folder=folder, sync=sync)


def assert_close(found: list[Tensors], expected: Tensors, tolerance: float = 1e-10) -> None:
    for rank, mine in enumerate(found):
        for name, value in expected.items():
            close = 1e-5 if value.dtype == torch.float32 else tolerance
            torch.testing.assert_close(
                mine[name],
                value,
                rtol=close,
                atol=close,
                msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}",
            )


# Synchronous: all-reduce by other means


@settings(max_examples=8)
@given(
    size=st.integers(1, 3),
    count=st.integers(6, 40),
    batch=st.integers(6, 12),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    fall=st.sampled_from([1.0, 0.5]),
)
def test_bsp_makes_the_updates_of_one_plain_model(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    count: int,
    batch: int,
    name: str,
    fall: float,
) -> None:
    job = Job(size, count, batch, optimizer=OPTIMIZERS[name], fall=fall)
    assert_close(trained(job, Server(), tmp_path_factory.mktemp("bsp")), plain(job))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_workers_may_take_the_steps(momentum: float, tmp_path: Path) -> None:
    """SGD is linear: the mean of all steps is the step by the mean."""
    job = Job(size=3, optimizer=sgd(momentum=momentum, weight_decay=0.01))
    assert_close(trained(job, "server:update=worker", tmp_path), plain(job))


JOBS = {
    "odd": Job(model=Odd),
    "half frozen": Job(model=half_frozen),
    "accumulating": Job(accumulate=2, count=47),
    "with a closure": Job(closure=True),
    "evaluating on one rank": Job(evaluate=True),
    "breaking off": Job(stop_after=2, count=47),
    "in bfloat16": Job(model=lambda: mlp().bfloat16(), count=24, optimizer=sgd()),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_of_all_kinds(name: str, tmp_path: Path) -> None:
    tolerance = 0.02 if name == "in bfloat16" else 1e-10
    assert_close(trained(JOBS[name], Server(), tmp_path), plain(JOBS[name]), tolerance)


def test_a_staleness_of_0_is_bsp_to_the_bit(tmp_path: Path) -> None:
    ours, bsp = (trained(Job(), f"server:staleness={how}", tmp_path)[0] for how in ("0", "bsp"))
    assert all(torch.equal(ours[name], value) for name, value in bsp.items())


@pytest.mark.parametrize(
    "text", ["server", "server:staleness=2", "server:async", "server:async,update=worker"]
)
def test_alone_it_is_plain_training_to_the_bit(text: str, tmp_path: Path) -> None:
    job = Job(size=1, optimizer=sgd(momentum=0.5, weight_decay=0.01))
    (found,) = trained(job, text, tmp_path)
    expected = plain(job)
    if "worker" in text:  # what is added is a difference, which is rounded
        assert_close([found], expected)
    else:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_statistics_are_averaged_when_a_pass_ends(tmp_path: Path) -> None:
    job = Job(model=normed, count=12, epochs=1)  # one step
    served = trained(job, Server(), tmp_path)
    apart = trained_apart(job, Local(every=1000, meet_epochs=False), tmp_path)
    for name in ("1.running_mean", "1.running_var"):
        mean = (apart[0][name] + apart[1][name]) / 2
        assert not torch.allclose(apart[0][name], apart[1][name])
        for mine in served:
            torch.testing.assert_close(mine[name], mean, rtol=1e-10, atol=1e-10)


def trained_apart(job: Job, sync: Strategy, folder: Path) -> list[Tensors]:
    """All-reduce leaves every rank its own statistics."""

    def body(run: Run) -> Tensors:
        model = seeded(job.model)
        optimizer = job.optimizer(model)
        wrapped, _ = run.distribute(model, optimizer)
        for x, y in run.loader(job.data(), global_batch_size=job.batch):
            optimizer.zero_grad()
            job.loss(wrapped, x, y).backward()
            optimizer.step()
        return state_of(model)

    return run_world(job.size, body, folder=folder, sync=sync)


def test_two_models_in_one_run(tmp_path: Path) -> None:
    """Each has a server of its own, and its own clock."""
    first, second = Job(), Job(optimizer=OPTIMIZERS["adam"])

    def body(run: Run) -> tuple[Tensors, Tensors]:
        models, data = [seeded(mlp), seeded(mlp)], first.data()
        pairs = [
            run.distribute(model, job.optimizer(model))
            for model, job in zip(models, (first, second), strict=True)
        ]
        for _ in run.epochs(2):
            for step, (x, y) in enumerate(run.loader(data, global_batch_size=12)):
                for index, (wrapped, optimizer) in enumerate(pairs):
                    if index == 0 or step != 1:  # they do not take the same number of steps
                        optimizer.zero_grad()
                        first.loss(wrapped, x, y).backward()
                        optimizer.step()
        assert all(run.check_in_step(wrapped) for wrapped, _ in pairs)
        return state_of(models[0]), state_of(models[1])

    ends = run_world(2, body, folder=tmp_path, sync=Server())
    assert_close([end[0] for end in ends], plain(dataclasses.replace(first, fall=1.0)))
    assert not torch.allclose(ends[0][1]["0.weight"], seeded(mlp).state_dict()["0.weight"])


# Bounds


class Others:
    """How many forward passes each rank has begun. Ranks may wait for one another here."""

    def __init__(self, size: int) -> None:
        self.begun = [0] * size
        self._changed = threading.Condition()

    def begin(self, rank: int) -> None:
        with self._changed:
            self.begun[rank] += 1
            self._changed.notify_all()

    def wait_until(self, rank: int, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun[rank] >= count, 20), self.begun


def falling(run: Run, steps: int, before: Callable[[int], object]) -> float:
    """Each step of each rank moves the weight by −0.5 / N, wherever it is. Where does it end?"""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    wrapped, _ = run.distribute(model, optimizer)
    data = TensorDataset(torch.ones(steps * run.size, 1, dtype=torch.float64))
    for step, (x,) in enumerate(run.loader(data, batch_size=1)):
        before(step)
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        optimizer.step()
    assert run.check_in_step(wrapped)
    return float(model.weight.detach())


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("bound", [1, 3])
def test_nobody_runs_further_ahead_than_the_bound(bound: int, update: str, tmp_path: Path) -> None:
    """A worker at clock c goes on when the slowest has reached c − s."""
    others, steps = Others(2), 8
    seen: list[int] = []
    threads: dict[int, int] = {}

    def body(run: Run) -> float:
        threads[run.rank] = threading.get_native_id()

        def before(step: int) -> None:
            if run.rank == 1:
                if step == 0:
                    others.wait_until(0, bound + 2)
                    wait_until_asleep(os.getpid(), [threads[0]])  # or it has gone on by now
                    seen.append(others.begun[0])
                others.begin(1)
            else:
                others.begin(0)

        return falling(run, steps, before)

    sync = Server(staleness=bound, update=update)
    ends = run_world(2, body, folder=tmp_path, sync=sync)
    # Clocks 0 to s without the other; and one more is begun, whose forward pass waits.
    assert seen == [bound + 2]
    assert ends == [pytest.approx(3.0 - 0.5 * steps, abs=1e-12)] * 2


def test_async_waits_for_nobody(tmp_path: Path) -> None:
    others, steps = Others(2), 6

    def body(run: Run) -> float:
        def before(step: int) -> None:
            if run.rank == 1 and step == 0:
                others.wait_until(0, steps)
            others.begin(run.rank)

        return falling(run, steps, before)

    ends = run_world(2, body, folder=tmp_path, sync=parse("server:async"))
    assert ends == [pytest.approx(3.0 - 0.5 * steps, abs=1e-12)] * 2


def test_a_round_does_not_wait_for_its_backups(tmp_path: Path) -> None:
    """Rank 2 comes when the others have nearly done. What it has for rounds that are over counts
    for nothing, and it goes on from the newest."""
    others, steps = Others(3), 6
    clocks: list[int] = []

    def body(run: Run) -> float:
        def before(step: int) -> None:
            if run.rank == 2 and step == 0:
                others.wait_until(0, steps)
                others.wait_until(1, steps)
            if run.rank == 2 and step == 1:
                clocks.append(run._session.models.synchronizers[0]._store.clock)  # type: ignore[attr-defined]
            others.begin(run.rank)

        return falling(run, steps, before)

    ends = run_world(3, body, folder=tmp_path, sync=parse("server:backups=1"))
    assert len(set(ends)) == 1
    assert clocks[0] >= steps - 1
    rounds = (3.0 - ends[0]) / 0.5
    assert rounds == pytest.approx(round(rounds))
    assert steps <= round(rounds) < 2 * steps  # those of ranks 0 and 1, and what rank 2 had left


@pytest.mark.parametrize("text", ["server", "server:staleness=1", "server:async"])
@pytest.mark.parametrize("saving", [False, True])
def test_a_step_that_one_rank_skips_holds_nobody_up(
    text: str, saving: bool, tmp_path: Path
) -> None:
    """As a gradient scaler does it. Also where all meet in the middle of the pass, to save."""

    def body(run: Run) -> bool:
        model = seeded(mlp)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        job = Job(count=60)
        data = job.data()
        for _ in run.epochs(2):
            for step, (x, y) in enumerate(run.loader(data, global_batch_size=12)):
                optimizer.zero_grad()
                job.loss(wrapped, x, y).backward()
                if run.rank == 0 or step not in (1, 2, 4):
                    optimizer.step()
                if saving and step == 2:
                    run.save()
        return bool(run.check_in_step(wrapped))

    assert run_world(2, body, folder=tmp_path, sync=parse(text)) == [True, True]


# Checkpoints


class Script:
    """Trains; saves at `save_at`, an epoch and a step, and stops; or loads and goes on."""

    def __init__(
        self,
        optimizer: MakeOptimizer = SGD,
        save_at: tuple[int, int] | None = None,
        *,
        load: bool = False,
        still: bool = False,  # at a rate of 0
    ) -> None:
        self.optimizer, self.save_at, self.load, self.still = optimizer, save_at, load, still

    def __call__(self, run: Run) -> Tensors:
        job, data = Job(), Job().data()
        model = seeded(mlp, seed=9 * self.load + run.rank)
        optimizer = self.optimizer(model)
        wrapped, _ = run.distribute(model, optimizer)
        scheduler = ExponentialLR(optimizer, 0.6)
        state = run.load() if self.load else None
        if state is not None:
            scheduler.load_state_dict(state["scheduler"])
        if self.still:
            optimizer.param_groups[0]["lr"] = 0.0
        for epoch in run.epochs(3):
            for step, (x, y) in enumerate(run.loader(data, global_batch_size=job.batch)):
                optimizer.zero_grad()
                job.loss(wrapped, x, y).backward()
                optimizer.step()
                if self.save_at == (epoch, step):
                    run.save(scheduler=scheduler.state_dict())
                    return state_of(model)
            scheduler.step()
            if self.save_at == (epoch, -1):
                run.save(scheduler=scheduler.state_dict())
                return state_of(model)
        return state_of(model)


def resumed(
    text: str, size: int, optimizer: MakeOptimizer, save_at: tuple[int, int], folder: Path
) -> None:
    sync = parse(text)
    whole = run_world(size, Script(optimizer), folder=folder / "whole", sync=sync)
    run_world(size, Script(optimizer, save_at), folder=folder / "stopped", sync=sync)
    ends = run_world(size, Script(optimizer, load=True), folder=folder / "stopped", sync=sync)
    for rank, (expected, found) in enumerate(zip(whole, ends, strict=True)):
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"rank {rank}: {name}"


@pytest.mark.parametrize(
    ("text", "optimizer", "save_at"),
    [
        ("server", "momentum", (1, 1)),
        ("server", "adam", (0, -1)),
        ("server", "adam", (1, 0)),
        ("server:update=worker", "adam", (1, 1)),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(
    text: str, optimizer: str, save_at: tuple[int, int], tmp_path: Path
) -> None:
    """With two ranks: the sum of three gradients depends on who comes first."""
    resumed(text, 2, OPTIMIZERS[optimizer], save_at, tmp_path)


@pytest.mark.parametrize("text", ["server:staleness=2", "server:async,update=worker"])
def test_a_stale_run_of_one_goes_on_to_the_bit(text: str, tmp_path: Path) -> None:
    resumed(text, 1, SGD, (1, 1), tmp_path)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_no_update_is_lost_by_saving_and_going_on(update: str, tmp_path: Path) -> None:
    """Ranks save while one has not read yet what the other has pushed."""
    steps = 6

    def body(run: Run, *, load: bool) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(model.weight, 3.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        wrapped, _ = run.distribute(model, optimizer)
        if load:
            nn.init.constant_(model.weight, 100.0)
            run.load()
        data = TensorDataset(torch.ones(steps * 2, 1, dtype=torch.float64))
        for _ in run.epochs(1):
            for step, (x,) in enumerate(run.loader(data, batch_size=1)):
                optimizer.zero_grad()
                wrapped(x).sum().backward()
                for rank in range(2):  # rank 0 reads before rank 1 pushes
                    run.group.barrier()
                    if rank == run.rank:
                        optimizer.step()
                if step == 2 and not load:
                    run.save()
        return float(model.weight.detach())

    sync = Server(staleness="async", update=update)
    expected = [pytest.approx(3.0 - 0.5 * steps, abs=1e-12)] * 2
    for load in (False, True):
        ends = run_world(2, lambda run, load=load: body(run, load=load), folder=tmp_path, sync=sync)
        assert ends == expected


@pytest.mark.filterwarnings("ignore:saved ")
@pytest.mark.parametrize(
    ("saved_under", "workers"), [("server", 3), ("allreduce", 2), ("server:async", 2)]
)
def test_another_run_goes_on_from_the_same_weights(
    saved_under: str, workers: int, tmp_path: Path
) -> None:
    """Under another number of workers or another strategy: the servers begin with what was loaded,
    and a rate of 0 keeps them there."""
    saved = run_world(workers, Script(save_at=(0, -1)), folder=tmp_path, sync=parse(saved_under))
    ends = run_world(2, Script(load=True, still=True), folder=tmp_path, sync=Server())
    for end in ends:
        assert all(torch.equal(end[name], value) for name, value in saved[0].items())


@pytest.mark.filterwarnings("ignore:saved ")
def test_other_strategies_go_on_from_its_checkpoints(tmp_path: Path) -> None:
    saved = run_world(2, Script(save_at=(1, 1)), folder=tmp_path, sync=Server())
    (end,) = run_world(1, Script(load=True, still=True), folder=tmp_path, sync=AllReduce())
    assert all(torch.equal(end[name], value) for name, value in saved[0].items())


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize("text", ["server", "downpour:fetch=1"])
def test_what_the_script_loads_itself_is_where_training_begins(
    text: str, with_loader: bool, tmp_path: Path
) -> None:
    def body(run: Run) -> Tensors:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped, _ = run.distribute(model, optimizer)
        model.load_state_dict(seeded(mlp, seed=4).state_dict())
        data = Job().data()
        batches = run.loader(data, batch_size=8) if with_loader else [data.tensors] * 3
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        run.group.barrier()  # rank 0 has the server, and must not leave before the others
        return state_of(model)

    expected = state_of(seeded(mlp, seed=4))
    for end in run_world(2, body, folder=tmp_path, sync=parse(text)):
        assert all(torch.equal(end[name], value) for name, value in expected.items())


# What is refused


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("server", Server()),
        ("server:bsp", Server()),
        ("server:staleness=bsp", Server()),
        ("server:async", Server(staleness="async")),
        ("server: async , update=worker", Server(staleness="async", update="worker")),
        ("server:staleness=4", Server(staleness=4)),
        ("server:bsp,backups=2", Server(backups=2)),
        ("server:staleness=0,backups=1", Server(staleness=0, backups=1)),
    ],
)
def test_text_and_back(text: str, same_as: Server) -> None:
    assert parse(text) == same_as
    assert parse(str(same_as)) == same_as


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:staleness=x", "staleness='x' is neither a number of clocks nor bsp or async"),
        ("server:staleness=1.5", "staleness='1.5' is neither a number"),
        ("server:staleness=-1", "staleness=-1 must be at least 0"),
        ("server:bsp,async", "'staleness' is given twice"),
        ("server:backups=-1", "backups=-1 must be at least 0"),
        ("server:async,backups=1", "backups=1 is for bsp; with staleness=async nobody waits"),
        ("server:staleness=2,backups=1", "backups=1 is for bsp"),
        ("server:update=clerk", "update='clerk' is not a choice"),
        ("server:asink", "no option 'asink'"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


@pytest.mark.parametrize("staleness", ["soon", 1.5, None, True])
def test_values_that_mean_nothing(staleness: Any) -> None:
    with pytest.raises(UserError, match=f"staleness='{staleness}' is neither a number of clocks"):
        Server(staleness=staleness)


def distributed(
    sync: Server, folder: Path, make: MakeOptimizer | None, model: Callable[[], nn.Module] = mlp
) -> None:
    def body(run: Run) -> None:
        built = model()
        if make is None:
            run.distribute(built)
        else:
            run.distribute(built, make(built))

    run_world(2, body, folder=folder, sync=sync)


def with_state(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("sync", "make", "message"),
    [
        (Server(), None, "server counts the optimizer's steps and was given none"),
        (Server(), lambda m: torch.optim.RMSprop(m.parameters()), "no rule for .*RMSprop.*=worker"),
        (Server(), with_state, "this optimizer has a state already.*update=worker"),
        (Server(backups=2), sgd(), "backups=2 of 2 workers leave nobody to wait for"),
    ],
)
def test_what_it_cannot_train(
    sync: Server, make: MakeOptimizer | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        distributed(sync, tmp_path, make)


def test_models_that_no_table_holds(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        return mlp().requires_grad_(False)

    with pytest.raises(UserError, match="the optimizer trains nothing"):
        distributed(Server(), tmp_path, sgd(), frozen)


def test_workers_of_several_hosts_need_servers_that_all_can_reach(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"on 2 hosts, and no parameter servers.*farandole server"):
        run_world(
            2,
            lambda run: train(run, Job()),
            folder=tmp_path,
            sync=Server(),
            topology=Topology.declared([1, 1]),
        )


@pytest.mark.parametrize("update", ["server", "worker"])
def test_what_was_frozen_cannot_be_trained_later(update: str, tmp_path: Path) -> None:
    """The servers do not hold it: without an error every rank would have its own."""

    def body(run: Run) -> None:
        model = half_frozen()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped, _ = run.distribute(model, optimizer)
        for x, y in run.loader(Job().data(), global_batch_size=12):
            model.requires_grad_(True)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()

    with pytest.raises(UserError, match=r"'0\.weight' has a gradient now, and was not"):
        run_world(2, body, folder=tmp_path, sync=Server(update=update))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [("server", 0), ("server", 1), ("server:staleness=1", 1), ("server:update=worker", 1)],
)
def test_what_is_not_finite_goes_nowhere(text: str, culprit: int, tmp_path: Path) -> None:
    models: dict[int, nn.Module] = {}

    def body(run: Run) -> None:
        model = models[run.rank] = seeded(mlp)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for step, (x, y) in enumerate(run.loader(Job().data(), global_batch_size=12)):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            if run.rank == culprit and step == 1:
                assert model[2].bias.grad is not None
                model[2].bias.grad[1] = torch.nan
            optimizer.step()

    with pytest.raises(DivergedError, match=rf"rank {culprit}, step 2: .*'2\.bias' is not finite"):
        run_world(2, body, folder=tmp_path, sync=parse(text), timeout=timedelta(seconds=5))
    other = models[1 - culprit]
    assert all(torch.isfinite(parameter).all() for parameter in other.parameters())


def test_bytes_and_waits_are_the_runs(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[int, float]:
        train(run, Job(epochs=1))
        return run.group.meter.bytes_sent, run.group.meter.waited_seconds

    size = sum(parameter.nbytes for parameter in mlp().parameters())
    for sent, waited in run_world(2, body, folder=tmp_path, sync=Server()):
        assert sent >= size * Job().steps
        assert waited > 0


def test_an_absent_rank_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    release = threading.Event()

    def body(run: Run) -> None:
        model = seeded(mlp)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for x, y in run.loader(Job().data(), global_batch_size=12):
            if run.rank == 1:
                release.wait(20)
                return
            F.cross_entropy(wrapped(x), y).backward()
            try:
                optimizer.step()
            finally:
                release.set()

    with pytest.raises(CommError, match=r"no answer within 1 s .*slowest of 2 workers"):
        run_world(2, body, folder=tmp_path, sync=Server(), timeout=timedelta(seconds=1))


def test_a_fused_optimizer_leaves_unscaling_to_us(tmp_path):
    """As GradScaler does it: the gradients are scaled, and the optimizer knows by how much."""

    def body(run: Run) -> list[float]:
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), 0.5, fused=True)
        model, opt = run.distribute(model, opt)
        for scale, skipped in ((8.0, False), (8.0, True), (2.0, False)):
            opt.zero_grad()
            (model(torch.ones(1, 2).double()).sum() * scale).backward()
            opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(float(skipped))
            opt.step()
        model(torch.ones(1, 2).double())
        return run.unwrap(model).weight.flatten().tolist()

    for sync in ("server", "server:async"):
        assert run_world(1, body, folder=tmp_path, sync=parse(sync)) == [[-1.0, -1.0]]


def test_overlap_takes_in_what_was_read_later_and_keeps_the_bound(tmp_path):
    def body(run: Run) -> tuple[bool, float]:
        model = nn.Linear(4, 1).double()
        opt = torch.optim.SGD(model.parameters(), 0.05)
        model, opt = run.distribute(model, opt)
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(64, 4, generator=draw).double())
        for _ in run.epochs(6):
            for (x,) in run.loader(data, global_batch_size=8):
                opt.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                opt.step()
        weight = run.unwrap(model).weight.detach()
        return bool(run.check_in_step(model)), float((weight - 1).abs().max())

    for sync in ("server:staleness=2,overlap", "server:async,overlap"):
        for in_step, error in run_world(2, body, folder=tmp_path, sync=parse(sync)):
            assert in_step
            assert error < 0.2
    with pytest.raises(UserError, match="overlap is for"):
        parse("server:overlap")

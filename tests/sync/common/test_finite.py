"""Under every strategy and codec, what is not finite stops all ranks before it is applied.

One rank's batch is NaN in one step. All ranks raise `DivergedError` with that rank's number, and no
parameter holds a NaN. With `check_finite=False` training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.errors import CommError, DivergedError
from farandole.sync import STRATEGIES, parse
from farandole.sync.allreduce.buckets import pack
from farandole.sync.common.device_check import DeviceChecks
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run

STEPS, ILL_STEP, ILL_RANK = 12, 5, 1  # the fifth batch
SOON = timedelta(seconds=20)
HOSTS = Topology.declared([2, 1])

TOGETHER = [
    "allreduce",
    "allreduce:batchnorm=sync",
    "allreduce:bucket_mib=0.0001",
    "allreduce:algorithm=ring",
    *(
        f"allreduce:codec={codec}"
        for codec in ("fp16", "bf16", "int8", "sign", "topk", "randk", "powersgd")
    ),
    "lagged:steps=2,first=0,last=0",
    "lagged:steps=9",
    "postlocal:every=3",
    "postlocal:every=3,at=0.1",
    "local:every=3",
    "local:every=3,codec=int8",
    "local:every=100",
    "adacomm:start=3,steps=3",
    "diloco:every=4",
    "federated:every=3",
    "daso:every=2,warmup=0,cooldown=0",
    "daso:every=2,warmup=0,cooldown=0,codec=int8",
    "daso:warmup=0.9",
    "hogwild",
]
ALONE = ["server", "server:staleness=1", "server:async", "server:update=worker", "downpour"]


class End(NamedTuple):
    error: Exception | None
    is_finite: bool


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * 12, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (len(x),), generator=generator))


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()


def train(
    run: Run,
    step: Step = plain_step,
    *,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, 0.05, momentum=0.9
    ),
    ill_rank: int = ILL_RANK,
) -> End:
    """Two epochs; a batch of one rank is NaN in the first."""
    model = network()
    model, optimizer = run.distribute(model, optimizer_of(model.parameters()))
    source = data()
    try:
        for _ in run.epochs(2):
            for x, y in run.loader(source, global_batch_size=12):
                if run.rank == ill_rank and run.steps == ILL_STEP:
                    x = x * torch.nan
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                run.observe_loss(loss.detach().nan_to_num())
                step(model, optimizer, loss)
            run.log(loss=1.0)
    except (DivergedError, CommError) as error:
        return End(error, is_finite(model))
    return End(None, is_finite(model))


def world(size: int, body: Callable[[Run], Any], folder: Path, text: str, **more: Any) -> list[Any]:
    hosts = HOSTS if size == 3 and text.startswith("daso") else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank that keeps a culprit back warns
        return run_world(
            size, body, folder=folder, sync=parse(text), timeout=SOON, topology=hosts, **more
        )


def require_stopped(end: End, rank: int = ILL_RANK, step: str = str(ILL_STEP)) -> None:
    assert isinstance(end.error, DivergedError), end.error
    message = str(end.error)
    assert message.startswith(f"rank {rank}, step {step}: its gradient of '"), message
    assert "Lower the learning rate" in message
    assert "check_finite=False" in message
    assert end.is_finite


def test_every_strategy_is_among_them() -> None:
    assert {parse(text).name for text in (*TOGETHER, *ALONE)} == set(STRATEGIES)


@pytest.mark.parametrize("text", TOGETHER)
def test_all_ranks_stop_with_finite_weights(text: str, tmp_path: Path) -> None:
    lag = text.startswith("lagged:steps=2")  # what was computed in a step is applied in the next
    for end in world(3, train, tmp_path, text):
        if "batchnorm=sync" in text:  # which spreads it in the forward pass
            assert "(like those of ranks 1, 2) is not finite" in str(end.error)
            assert end.is_finite
        else:
            require_stopped(end, step=str(ILL_STEP + lag))


@pytest.mark.parametrize("text", ALONE)
def test_on_servers_the_rank_stops_alone_and_pushes_nothing(text: str, tmp_path: Path) -> None:
    """The others may go on without it."""
    ends = world(2, train, tmp_path, text)
    error = str(ends[ILL_RANK].error)
    assert isinstance(ends[ILL_RANK].error, DivergedError)
    assert error.startswith(f"rank {ILL_RANK}, step {ILL_STEP}: ")
    assert ends[0].is_finite


@pytest.mark.parametrize("text", TOGETHER)
def test_without_the_check_it_goes_on(text: str, tmp_path: Path) -> None:
    ends = world(3, train, tmp_path, text, check_finite=False)
    assert [end.error for end in ends] == [None] * 3
    assert not all(end.is_finite for end in ends)


@pytest.mark.parametrize("text", ["allreduce", "local:every=3", "lagged", "hogwild", "postlocal"])
def test_a_run_that_is_alone_stops_too(text: str, tmp_path: Path) -> None:
    (end,) = world(1, lambda run: train(run, ill_rank=0), tmp_path, text)
    require_stopped(end, rank=0)
    (end,) = world(1, lambda run: train(run, ill_rank=0), tmp_path, text, check_finite=False)
    assert end.error is None
    assert not end.is_finite


# What a step may look like


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def closed_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    def closure() -> float:
        loss.backward()
        return 1.0

    optimizer.step(closure)


@pytest.mark.parametrize("text", ["allreduce:bucket_mib=0.0001", "allreduce", "local:every=3"])
@pytest.mark.parametrize("step", [clipped_step, closed_step])
def test_clipping_and_closures(step: Step, text: str, tmp_path: Path) -> None:
    for end in world(3, lambda run: train(run, step), tmp_path, text):
        assert str(end.error).startswith(f"rank {ILL_RANK}, step {ILL_STEP}: its gradient of ")
        assert end.is_finite


def once(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    model, optimizer = run.distribute(model, optimizer)
    return model, optimizer


def raised(step: Callable[[], Any]) -> str:
    with pytest.raises(DivergedError) as caught:
        step()
    return str(caught.value)


def test_the_first_step_and_a_gradient_that_others_do_not_have(tmp_path: Path) -> None:
    """Buckets are packed anew after the first pass; a parameter may have a gradient on one rank."""

    def body(run: Run) -> tuple[str, bool]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        _, optimizer = once(run, model, torch.optim.SGD(model.parameters(), 0.1))
        x = torch.ones(1, 2)
        loss = model["a"](x).sum()
        if run.rank == 2:
            loss = loss + (model["b"](x) * torch.inf).sum()
        loss.backward()
        return raised(optimizer.step), is_finite(model)

    for message, fine in run_world(3, body, folder=tmp_path, timeout=SOON):
        assert message.startswith("rank 2, step 1: its gradient of 'b.")
        assert fine


@pytest.mark.parametrize("kind", ["complex", "half", "accumulated", "overflow"])
def test_kinds_of_gradients(kind: str, tmp_path: Path) -> None:
    dtype = {"complex": torch.complex64, "half": torch.bfloat16}.get(kind, torch.float32)

    def body(run: Run) -> tuple[str, bool]:
        model = nn.Linear(1, 1, bias=False, dtype=dtype)
        _, optimizer = once(run, model, torch.optim.SGD(model.parameters(), 0.1))
        x = torch.ones(1, 1, dtype=dtype)
        factor = torch.nan if run.rank == 1 and kind != "overflow" else 1.0
        if kind == "overflow":  # finite on every rank, and not on average
            factor = 2.5e38
        with run.no_sync(model):
            if kind == "accumulated":
                (model(x).sum() * factor).backward()
                factor = 1.0
        (model(x).abs() * factor).sum().backward()
        return raised(optimizer.step), is_finite(model)

    for rank, (message, fine) in enumerate(run_world(2, body, folder=tmp_path, timeout=SOON)):
        if kind == "overflow":
            assert message.startswith(f"rank {rank}, step 1: the average of '")
        else:
            assert message.startswith("rank 1, step 1: its gradient of '")
        assert fine


def test_large_numbers_are_finite(tmp_path: Path) -> None:
    """Their sum is not."""

    def body(run: Run) -> bool:
        model = nn.Linear(8, 1, bias=False)
        _, optimizer = once(run, model, torch.optim.SGD(model.parameters(), 1e-38))
        (model(torch.full((1, 8), 1e38))).sum().backward()
        optimizer.step()
        return is_finite(model)

    assert run_world(2, body, folder=tmp_path, timeout=SOON) == [True, True]


def test_sparse_gradients_and_lbfgs_alone(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[str, str, bool]:
        table = nn.Embedding(4, 2, sparse=True)
        _, optimizer = once(run, table, torch.optim.SparseAdam(table.parameters(), 0.1))
        (table(torch.tensor([1])) * torch.nan).sum().backward()
        first = raised(optimizer.step)
        model = nn.Linear(2, 2)
        _, lbfgs = once(run, model, torch.optim.LBFGS(model.parameters()))

        def closure() -> torch.Tensor:
            loss = (model(torch.ones(1, 2)) * torch.nan).sum()
            loss.backward()
            return loss

        return first, raised(lambda: lbfgs.step(closure)), is_finite(table) and is_finite(model)

    ((sparse, closed, fine),) = run_world(1, body, folder=tmp_path)
    assert sparse.startswith("rank 0, step 1: its gradient of 'weight'")
    assert closed.startswith("rank 0, step 1: its gradient of 'bias'")
    assert fine


def test_two_models_with_an_optimizer_each(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[str, bool, bool]:
        made = [nn.Linear(2, 2), nn.Linear(2, 2)]
        pairs = [once(run, m, torch.optim.Adam(m.parameters(), 0.1)) for m in made]
        for model, optimizer in pairs:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (_, first), (critic, second) = pairs
        made[0](torch.ones(1, 2)).sum().backward()
        first.step()
        critic(torch.full((1, 2), torch.nan if run.rank else 1.0)).sum().backward()
        return raised(second.step), is_finite(made[0]), is_finite(made[1])

    for message, *fine in run_world(2, body, folder=tmp_path, timeout=SOON):
        assert message.startswith("rank 1, step 2: its gradient of ")
        assert fine == [True, True]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("text", ["allreduce", "allreduce:codec=int8", "local:every=2"])
def test_what_a_scaler_skips_is_no_error(text: str, fused: bool, tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        model = nn.Linear(4, 4)
        chosen = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
        _, optimizer = once(run, model, chosen)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum() * (torch.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return is_finite(model) and scaler.get_scale() < 4.0

    assert world(2, body, tmp_path, text) == [True, True]


def test_what_a_codec_remembers_stays_as_it_was(tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        model = nn.Linear(40, 40)
        _, optimizer = once(run, model, torch.optim.SGD(model.parameters(), 0.1))
        synchronizer = run._session.models.synchronizers[0]

        def backward(factor: float) -> None:
            optimizer.zero_grad()
            x = torch.randn(2, 40, generator=torch.Generator().manual_seed(run.rank))
            (model(x) ** 2 * factor).sum().backward()

        backward(1.0)
        optimizer.step()
        before = {
            (name, what): value.clone()
            for name, memory in synchronizer.state_dict()["codec"].items()
            for what, value in memory.items()
        }
        backward(torch.nan if run.rank == 1 else 1.0)
        raised(optimizer.step)
        after = synchronizer.state_dict()["codec"]
        return bool(before) and all(
            torch.equal(after[name][what], value) for (name, what), value in before.items()
        )

    assert world(2, body, tmp_path, "allreduce:codec=int8") == [True, True]


# What is found at the end of a pass, or when a run is saved


def after_a_pass(spoil: Callable[[Run, nn.Module], None], *, show: bool = True) -> Any:
    def body(run: Run) -> str:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e30)
        if show:
            run.distribute(model, optimizer)
        else:
            run.distribute(model)

        def epoch() -> None:
            for _ in run.loader(data(), global_batch_size=72):
                spoil(run, model)
                optimizer.step()

        return raised(epoch)

    return body


def large_update(run: Run, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)


def ill_statistics(run: Run, model: nn.Module) -> None:
    if run.rank == 1:
        model[1].running_var[0] = torch.inf


def ill_gradient(run: Run, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)


@pytest.mark.parametrize(
    ("spoil", "show", "message"),
    [
        (large_update, True, "rank 0, step 2: its parameter '0.weight' is not finite"),
        (ill_statistics, True, "rank 1, step 2: its statistic '1.running_var' is not finite"),
        (ill_gradient, False, "rank 0, step 2: its parameter '0.weight' is not finite"),
    ],
    ids=["an update overflows", "statistics", "an optimizer that nobody has shown"],
)
def test_the_end_of_a_pass_shows_the_rest(
    spoil: Callable[[Run, nn.Module], None], show: bool, message: str, tmp_path: Path
) -> None:
    for said in run_world(2, after_a_pass(spoil, show=show), folder=tmp_path, timeout=SOON):
        assert said.startswith(message)
        assert "earlier checkpoint" in said


def test_a_run_that_is_to_stop_is_not_saved(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[str, bool]:
        model = network()
        _, optimizer = once(run, model, torch.optim.SGD(model.parameters(), 0.1))
        for x, y in run.loader(data(), global_batch_size=12):
            optimizer.zero_grad()
            F.cross_entropy(model(x * (torch.nan if run.rank else 1.0)), y).backward()
            optimizer.step()
            break
        run._passes._unsettled = False  # in the middle of the pass
        return raised(run.save), is_finite(model)

    ends = world(2, body, tmp_path, "local:every=100,meet_epochs=no")
    assert all(message.startswith("rank 1, step 1: its gradient of") for message, _ in ends)
    assert all(fine for _, fine in ends)
    assert not list(tmp_path.rglob("manifest.json"))


# A device that is not waited for


def test_a_device_answers_one_step_late_and_applies_zeros() -> None:
    """The same operations on tensors of a CPU."""
    bucket = pack([("w", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(2)))], ranks=3)
    (held,) = bucket
    held.buffer.fill_(1.0)
    held.notes.zero_()
    loose = torch.ones(2, dtype=torch.float64)
    gradients = [loose, *held.gradients]
    checks = DeviceChecks()
    fine = checks.start(gradients, lambda: [loose, held.buffer], bucket)
    assert fine.first_bad() is None
    assert torch.equal(loose, torch.ones(2, dtype=torch.float64))
    held.gradients[1][0] = torch.inf
    held.notes[2] = torch.nan
    ill = checks.start(gradients, lambda: [loose, held.buffer], bucket)
    assert ill.first_bad() == 2
    assert ill.noted() == [(held, [2])]
    assert not loose.any()
    assert not any(gradient.any() for gradient in held.gradients)


# The switch


def test_a_script_turns_it_off_by_an_argument_of_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def train_alone(run: Run) -> bool:
        model = nn.Linear(2, 2)
        _, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        (model(torch.ones(1, 2)) * torch.nan).sum().backward()
        optimizer.step()
        return is_finite(model)

    with fd.init() as run, pytest.raises(DivergedError, match="rank 0, step 1"):
        train_alone(run)
    with fd.init(check_finite=False) as run:
        assert not train_alone(run)
    monkeypatch.setenv("FARANDOLE_CHECK_FINITE", "0")
    with fd.init() as run:
        assert not train_alone(run)
    monkeypatch.setenv("FARANDOLE_CHECK_FINITE", "no")
    with pytest.raises(fd.UserError, match="FARANDOLE_CHECK_FINITE='no' is neither 0 nor 1"):
        fd.init()

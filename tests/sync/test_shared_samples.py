"""A step with fewer samples than workers, under every strategy.

Its samples are shared: several workers read the same one, and each counts its part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.data.order import shuffled
from farandole.sync import STRATEGIES, AllReduce, parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run

SIZE, EPOCHS, STEPS = 4, 2, 3
ALL_READ_ONE, ALL_READ_THREE, EACH_READS_ONE = (13, 6), (27, 12), (15, 6)
TAILS = [ALL_READ_ONE, ALL_READ_THREE, EACH_READS_ONE]  # samples, and those of a step

EXACT = (
    "allreduce",
    "local:every=1",
    "lagged:steps=99",
    "postlocal",
    "server",
    "server:update=worker",
)
OTHERS = (
    "allreduce:codec=int8",
    "lagged:steps=1",
    "local:every=2,moments=average",
    "local:every=4,codec=int8",
    "adacomm:start=4,steps=2",
    "diloco:every=2",
    "federated:every=2,fraction=0.75",
    "daso:every=1,warmup=0.3,cooldown=0.3",
    "hogwild",
    "server:staleness=1",
    "server:async",
    "downpour:push=2,fetch=2",
)


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def network(norm: Callable[[int], nn.Module] = nn.Identity) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_epoch(source: TensorDataset, batch: int, epoch: int) -> Iterator[list[torch.Tensor]]:
    for chosen in torch.tensor(shuffled(len(source), 0, epoch)).split(batch):
        yield [tensor[chosen] for tensor in source.tensors]


def plain(count: int, batch: int) -> dict[str, torch.Tensor]:
    """One worker, in plain PyTorch."""
    model, source = network(), data(count)
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        for x, y in plain_epoch(source, batch, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model)


def step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    run.observe_loss(loss)
    optimizer.step()


def trained(folder: Path, text: str, count: int, batch: int) -> list[dict[str, torch.Tensor]]:
    source = data(count)

    def body(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = run.distribute(*_with_optimizer(), sync=parse(text))
        for _ in run.epochs(EPOCHS):
            loader = run.loader(source, global_batch_size=batch)
            for x, y in loader:
                step(run, model, optimizer, x, y)
            assert run.check_in_step(model)
        assert run.steps == EPOCHS * STEPS
        assert run.samples == EPOCHS * count
        return weights(model)

    hosts = Topology.declared([2, 2]) if text.startswith("daso") else None
    return run_world(SIZE, body, folder=folder, topology=hosts)


def _with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, sgd(model)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_every_strategy_is_among_them() -> None:
    assert {parse(text).name for text in (*EXACT, *OTHERS)} == set(STRATEGIES)


@pytest.mark.parametrize(("count", "batch"), TAILS)
@pytest.mark.parametrize("text", EXACT)
def test_steps_are_those_of_one_worker(tmp_path: Path, text: str, count: int, batch: int) -> None:
    for found in trained(tmp_path, text, count, batch):
        assert_same(found, plain(count, batch))


@pytest.mark.parametrize("text", OTHERS)
def test_others_take_as_many_steps_and_end_close_by(tmp_path: Path, text: str) -> None:
    """As close as models whose gradients are not of the same place can be."""
    before, expected = network().state_dict(), plain(*EACH_READS_ONE)
    moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
    for found in trained(tmp_path, text, *EACH_READS_ONE):
        for name, value in found.items():
            assert value.isfinite().all()
            assert float((value - expected[name]).abs().max()) < 3 * moved


def test_a_run_that_goes_on_with_fewer_workers_takes_the_steps_of_one(tmp_path: Path) -> None:
    count, batch = ALL_READ_ONE
    source, saved = data(count), tmp_path / "saved"

    def begin(run: Run) -> None:
        model, optimizer = run.distribute(*_with_optimizer())
        for epoch in run.epochs(EPOCHS):
            for number, (x, y) in enumerate(run.loader(source, global_batch_size=batch)):
                step(run, model, optimizer, x, y)
                if (epoch, number) == (1, 1):
                    run.save(saved)
                    return

    def go_on(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = run.distribute(*_with_optimizer())
        run.load(saved)
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader(source, global_batch_size=batch):
                step(run, model, optimizer, x, y)
        assert run.steps == EPOCHS * STEPS
        return weights(model)

    run_world(SIZE, begin, folder=tmp_path / "first")
    with pytest.warns(UserWarning, match="saved on 4 workers, resumed on 3"):
        states = run_world(3, go_on, folder=tmp_path / "second")
    for found in states:
        assert_same(found, plain(count, batch))


@pytest.mark.parametrize(("count", "batch"), TAILS)
def test_the_loss_that_strategies_see_is_the_mean_over_samples(
    tmp_path: Path, count: int, batch: int
) -> None:
    source = data(count)

    def body(run: Run) -> list[float]:
        model = network()
        model, optimizer = run.distribute(
            model, torch.optim.SGD(model.parameters(), 0.0), sync=parse("local:every=99")
        )
        losses = []
        for x, y in run.loader(source, global_batch_size=batch):
            step(run, model, optimizer, x, y)
            total, number = run._session.models.synchronizers[0]._losses.take()
            losses.append(run.sum(total) / run.sum(number))
        return losses

    model = network().requires_grad_(False)
    expected = [float(F.cross_entropy(model(x), y)) for x, y in plain_epoch(source, batch, 0)]
    for losses in run_world(SIZE, body, folder=tmp_path):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_script_can_count_by_what_the_loader_says(tmp_path: Path) -> None:
    source = data(EACH_READS_ONE[0])

    def body(run: Run) -> tuple[float, float]:
        loader = run.loader(source, global_batch_size=EACH_READS_ONE[1])
        seen = total = 0.0
        for x, _ in loader:
            seen += loader.last_batch.own_samples
            total += float(x.mean()) * loader.last_batch.own_samples
        return run.sum(seen), run.sum(total)

    mean = float(source.tensors[0].mean())
    for seen, total in run_world(SIZE, body, folder=tmp_path):
        assert seen == pytest.approx(len(source))
        assert total / seen == pytest.approx(mean, rel=1e-12)


def test_an_evaluation_with_gradients_is_told_that_it_counts_samples_several_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under no_grad it sees every sample once, and nothing is said; nor is it in training."""
    source = data(13)

    def body(run: Run) -> list[float]:
        model, _ = run.distribute(*_with_optimizer())
        seen = [run.sum(sum(len(y) for _, y in run.loader(source, 2)))]  # training
        model.eval()
        with torch.no_grad():
            seen.append(run.sum(sum(len(y) for _, y in run.loader(source, 2))))
        run.print("from here on with gradients")
        for _ in range(2):
            seen.append(run.sum(sum(len(y) for _, y in run.loader(source, 2, shuffle=False))))
        return seen

    assert run_world(3, body, folder=tmp_path) == [[15, 13, 15, 15]] * 3
    before, after = capsys.readouterr().out.split("from here on with gradients")
    assert "counts them several times" not in before
    assert after.count("counts them several times. To evaluate, put the loop") == 1


def batchnorm_epoch(folder: Path, count: int, batch: int, sync: AllReduce) -> list[nn.Module]:
    source = data(count)

    def body(run: Run) -> nn.Module:
        model = network(nn.BatchNorm1d)
        model, optimizer = run.distribute(model, sgd(model), sync=sync)
        for x, y in run.loader(source, global_batch_size=batch):
            step(run, model, optimizer, x, y)
        return run.unwrap(model)

    return run_world(SIZE, body, folder=folder)


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_batchnorm_refuses_a_last_step_of_one_value_as_on_one_worker(
    tmp_path: Path, batchnorm: str
) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batchnorm_epoch(tmp_path, 17, 16, AllReduce(batchnorm=batchnorm))
    model = network(nn.BatchNorm1d)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model(data(1).tensors[0])


def test_plain_batchnorm_sees_a_whole_short_step_as_on_one_worker(tmp_path: Path) -> None:
    """Its three samples, not one of them, which it would refuse."""
    source = data(27)

    def body(run: Run) -> nn.BatchNorm1d:
        model = network(lambda width: nn.BatchNorm1d(width, momentum=1.0))
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.0))
        for x, y in run.loader(source, global_batch_size=24):
            step(run, model, optimizer, x, y)
        return model[1]

    x, _ = list(plain_epoch(source, 24, 0))[-1]
    seen = network()[0].requires_grad_(False)(x)
    for norm in run_world(SIZE, body, folder=tmp_path):
        torch.testing.assert_close(norm.running_mean, seen.mean(0))
        torch.testing.assert_close(norm.running_var, seen.var(0))
        assert norm.num_batches_tracked == 2

"""All-reduce with a codec: trains as well, resumes to the bit, and combines with the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.comm.codecs import Int8, PowerSgd, TopK
from farandole.errors import UserError
from farandole.schedule import ALGORITHMS
from farandole.sync import AllReduce, parse
from farandole.testing import run_world
from farandole.train import Run

CODECS = ["fp16", "bf16", "int8", "topk:ratio=0.05", "randk", "sign", "powersgd:warm_steps=3"]
Weights = dict[str, torch.Tensor]


# Text


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("allreduce:codec=int8", AllReduce(codec=Int8())),
        ("allreduce:codec=topk:ratio=0.02", AllReduce(codec=TopK(ratio=0.02))),
        (
            "allreduce:bucket_mib=2,algorithm=ring,codec=powersgd:rank=3/warm_steps=10",
            AllReduce(bucket_mib=2, algorithm="ring", codec=PowerSgd(rank=3, warm_steps=10)),
        ),
        ("allreduce:algorithm=native", AllReduce(algorithm="native")),
    ],
)
def test_text_and_back(text: str, strategy: AllReduce) -> None:
    assert parse(text) == strategy
    assert str(strategy) == text


def test_a_codec_may_be_given_as_text() -> None:
    assert AllReduce(codec="int8:block=64") == AllReduce(codec=Int8(block=64))
    assert parse("allreduce:codec=none") == AllReduce()


@pytest.mark.parametrize("codec", [Int8, 8])
def test_what_is_no_codec(codec: Any) -> None:
    with pytest.raises(UserError, match=r"is no codec\. Give one, such as Int8\(\), or its text"):
        AllReduce(codec=codec)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "native", "auto"])
def test_every_algorithm_may_be_asked_for(algorithm: str) -> None:
    assert parse(f"allreduce:algorithm={algorithm}").algorithm == algorithm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allreduce:codec=int9", "there is no codec 'int9'. Did you mean 'int8'?"),
        ("allreduce:codec", "option 'codec' needs a value"),
        ("allreduce:codec=topk:ratio=2", "topk: ratio=2 must be above 0 and at most 1"),
        ("allreduce:codec=topk:ratoi=1", "codec 'topk' has no option 'ratoi'. Did you mean"),
        ("allreduce:algorithm=rink", "there is no algorithm 'rink'. Did you mean 'ring'?"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert message in str(error.value)


# Training


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, then those to test with."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Without torch's own generator, which all ranks here share."""
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.uniform_(-bound, bound, generator=generator)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train_on_digits(sync: AllReduce, folder: Path) -> tuple[float, int]:
    """The accuracy that two ranks reach in 100 steps, and the bytes that each has sent."""
    x, y, test_x, test_y = digits()

    def body(run: Run) -> tuple[float, int]:
        model = seeded(perceptron)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.3))
        before = run.group.meter.bytes_sent
        for step in range(100):
            batch = torch.arange(32) + 64 * step + 32 * run.rank
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x[batch % len(x)]), y[batch % len(y)]).backward()
            optimizer.step()
        sent = run.group.meter.bytes_sent - before
        assert run.check_in_step(wrapped)
        with torch.no_grad():
            return (model(test_x).argmax(dim=1) == test_y).float().mean().item(), sent

    first: tuple[float, int] = run_world(2, body, folder=folder, sync=sync)[0]
    return first


MARGIN = 0.02


@pytest.fixture(scope="module")
def raw_on_digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, int]:
    return train_on_digits(AllReduce(), tmp_path_factory.mktemp("raw"))


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("codec", CODECS)
def test_digits_are_learnt_as_well(
    codec: str, raw_on_digits: tuple[float, int], tmp_path: Path
) -> None:
    accuracy, sent = train_on_digits(AllReduce(codec=codec), tmp_path)
    assert raw_on_digits[0] > 0.9
    assert accuracy > raw_on_digits[0] - MARGIN
    assert sent < 0.55 * raw_on_digits[1]


class Script:
    """Trains on three ranks; saves after `save_after` steps, or goes on from there."""

    def __init__(self, *, save_after: int | None = None, load: bool = False, steps: int = 6):
        self.save_after, self.load, self.steps = save_after, load, steps

    def __call__(self, run: Run) -> Weights:
        model = seeded(perceptron, seed=5 if self.load else 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
        wrapped, optimizer = run.distribute(model, optimizer)
        if self.load:
            assert run.load() is not None
        x, y, _, _ = digits()
        data = TensorDataset(x[:150], y[:150])  # 3 steps an epoch
        for _ in run.epochs(self.steps // 3):
            for inputs, labels in run.loader(data, global_batch_size=50):
                optimizer.zero_grad()
                F.cross_entropy(wrapped(inputs), labels).backward()
                optimizer.step()
                if run.steps == self.save_after:
                    run.save()
                    return {}
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("codec", CODECS)
def test_a_resumed_run_goes_on_to_the_bit(codec: str, tmp_path: Path) -> None:
    """Many buckets, which DDP rebuilds after the first step of each process."""
    sync = AllReduce(codec=codec, bucket_mib=0.01)
    whole = run_world(3, Script(), folder=tmp_path / "whole", sync=sync)
    run_world(3, Script(save_after=4), folder=tmp_path / "cut", sync=sync)
    after = run_world(3, Script(load=True), folder=tmp_path / "cut", sync=sync)
    for rank in range(3):
        for name, value in whole[rank].items():
            assert torch.equal(after[rank][name], value), f"{name} on rank {rank}"


@pytest.mark.needs("sklearn")
def test_what_was_left_over_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Without it, the run above would end elsewhere: the test can fail."""
    sync = AllReduce(codec="topk")
    whole = run_world(3, Script(), folder=tmp_path / "whole", sync=sync)[0]
    run_world(3, Script(save_after=4), folder=tmp_path / "cut", sync=sync)
    other = AllReduce(codec="topk", bucket_mib=1)  # another strategy starts afresh
    with pytest.warns(UserWarning, match="saved under allreduce:codec=topk, resumed under"):
        after = run_world(3, Script(load=True), folder=tmp_path / "cut", sync=other)[0]
    assert not torch.equal(after["0.weight"], whole["0.weight"])


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("codec", CODECS)
def test_the_buckets_do_not_matter(codec: str, tmp_path: Path) -> None:
    ends = [
        run_world(
            3, Script(steps=3), folder=tmp_path, sync=AllReduce(codec=codec, bucket_mib=bucket_mib)
        )[0]
        for bucket_mib in (0.001, 25.0)
    ]
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


# Combined with the rest


def one_model_many_ways(run: Run, *, accumulate: int = 1, dtype: torch.dtype) -> Weights:
    """Tied, frozen and unused parameters, a convolution in channels-last."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 40, 3)
            self.into = nn.Linear(40 * 4, 40)
            self.tied = nn.Linear(40 * 4, 40)
            self.tied.weight = self.into.weight
            self.frozen = nn.Linear(40, 40)
            self.frozen.requires_grad_(False)
            self.never = nn.Linear(40, 40)
            self.out = nn.Linear(40, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.conv(x).relu().flatten(1)
            return self.out(self.frozen(self.into(hidden) + self.tied(hidden)))

    model = seeded(Net).to(dtype, memory_format=torch.channels_last)
    wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.05))
    x, y, _, _ = digits()
    images = x.view(-1, 1, 8, 8)[:, :, ::2, ::2].to(dtype)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(accumulate):
            batch = torch.arange(12) + 36 * step + 12 * run.rank
            batch = batch[part * (12 // accumulate) : (part + 1) * (12 // accumulate)]
            last = part == accumulate - 1
            with nullcontext() if last else run.no_sync(wrapped):
                loss = F.cross_entropy(wrapped(images[batch]), y[batch]) / accumulate
                loss.backward()
        optimizer.step()
    assert run.check_in_step(wrapped)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.05", "powersgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_odd_parameters_in_any_precision(codec: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def body(run: Run) -> Weights:
        return one_model_many_ways(run, dtype=dtype)

    sync = AllReduce(codec=codec)
    for weights in run_world(3, body, folder=tmp_path, sync=sync):
        assert weights["into.weight"].dtype == dtype
        assert weights["into.weight"].isfinite().all()


@pytest.mark.needs("sklearn")
def test_accumulated_gradients_travel_once(tmp_path: Path) -> None:
    def sent(accumulate: int) -> tuple[int, Weights]:
        def body(run: Run) -> tuple[int, Weights]:
            before = run.group.meter.bytes_sent
            weights = one_model_many_ways(run, accumulate=accumulate, dtype=torch.float64)
            return run.group.meter.bytes_sent - before, weights

        sync = AllReduce(codec="fp16")
        first: tuple[int, Weights] = run_world(3, body, folder=tmp_path, sync=sync)[0]
        return first

    (once, whole), (in_parts, parts) = sent(1), sent(3)
    assert once == in_parts
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-2, atol=1e-4)


@pytest.mark.needs("sklearn")
def test_a_gradient_that_is_not_finite_reaches_every_rank_and_is_forgotten(tmp_path: Path) -> None:
    """As loss scaling wants it: all ranks see it and skip the step."""

    def body(run: Run) -> list[bool]:
        model = seeded(perceptron)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        x, y, _, _ = digits()
        seen = []
        for step in range(4):
            inputs = x[:16].clone()
            if step == 2 and run.rank == 1:
                inputs[3, 7] = torch.inf
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), y[:16]).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            seen.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
            if seen[-1]:
                optimizer.step()
        assert run.check_in_step(wrapped)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return seen

    for seen in run_world(2, body, folder=tmp_path, sync=AllReduce(codec="topk")):
        assert seen == [True, True, False, True]


def test_complex_parameters_are_refused_before_the_training(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(UserError, match=r"codec int8 .*'weight' is torch.complex64"):
            run.distribute(model)

    run_world(2, body, folder=tmp_path, sync=AllReduce(codec="int8"))


def test_without_a_codec_there_is_nothing_to_remember(tmp_path: Path) -> None:
    def body(run: Run) -> list[Any]:
        states = []
        for sync in (AllReduce(), AllReduce(codec="int8"), AllReduce(codec="fp16")):
            model = seeded(perceptron)
            wrapped = run.distribute(model, sync=sync)
            wrapped(torch.ones(1, 64)).sum().backward()
            states.append(run._session.models.synchronizers[-1].state_dict())
        return states

    raw, int8, fp16 = run_world(2, body, folder=tmp_path)[0]
    assert raw == {}
    assert int8["codec"].keys() == {"0.weight", "2.weight"}  # biases travel raw
    assert fp16 == {"codec": {}}


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring", "halving_doubling"])
def test_the_algorithm_changes_the_way_and_not_the_sum(algorithm: str, tmp_path: Path) -> None:
    def body(run: Run) -> Weights:
        return one_model_many_ways(run, dtype=torch.float64)

    end = run_world(3, body, folder=tmp_path, sync=AllReduce(algorithm=algorithm))
    plain = run_world(3, body, folder=tmp_path, sync=AllReduce())
    for name, value in plain[0].items():
        torch.testing.assert_close(end[0][name], value, rtol=1e-12, atol=1e-12)


SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import farandole as fd
from farandole.comm.codecs import CODECS

run = fd.init(timeout=150)
for name in CODECS:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = run.distribute(model, optimizer, sync=fd.AllReduce(0.005, codec=name))
    losses = []
    for step in range(8):
        torch.manual_seed(10 + run.rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(torch.randn(32, 64)), torch.arange(32) % 10)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = run.check_in_step(wrapped)
    assert state, f"{name}: {state}"
    assert losses[-1] < losses[0], (name, losses)
run.print("all in step")
"""


def test_between_real_processes(sandbox: Any, two_ranks: list[dict[str, str]]) -> None:
    ends = sandbox.by_hand(two_ranks, sandbox.script("codecs.py", SCRIPT))
    assert [end.returncode for end in ends] == [0, 0], ends
    assert "all in step" in ends[0].stdout


def test_time_that_is_waited_for_a_codec_counts_once(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[float, float]:
        model = seeded(perceptron)
        model, _ = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        inputs = torch.randn(4, next(model.parameters()).shape[1])
        waited = passed = 0.0
        for _ in range(3):
            run.group.barrier()
            before = run.group.meter.waited_seconds
            if run.rank == 1:
                time.sleep(0.05)  # rank 0 waits for this in its backward pass
            begin = time.perf_counter()
            model(inputs).sum().backward()
            passed += time.perf_counter() - begin
            waited += run.group.meter.waited_seconds - before
        return waited, passed

    for waited, passed in run_world(2, body, folder=tmp_path, sync=AllReduce(codec="int8")):
        assert waited <= passed

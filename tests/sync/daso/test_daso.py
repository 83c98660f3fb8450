"""DASO against a plain simulation of it, on even and uneven hosts; its faults and limits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from farandole.data import Shares
from farandole.data.order import shuffled
from farandole.errors import DivergedError, UserError
from farandole.sync import AllReduce, Daso, parse
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from tests.conftest import Sandbox

BATCH, EPOCHS = 12, 4
COUNT = 67  # the last batch is uneven between ranks


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=generator))


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def train(run: Run, make: Any = network) -> list[torch.Tensor]:
    model = make()
    wrapped, optimizer = run.distribute(model, optimizer_of(model))
    source = data()
    for _ in run.epochs(EPOCHS):
        for x, y in run.loader(source, global_batch_size=BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            run.observe_loss(loss)
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Host:
    """A host in the simulation: one model, which takes the steps of all its workers."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.model = network()
        self.optimizer = optimizer_of(self.model)


def simulated(daso: Daso, counts: Sequence[int]) -> list[torch.Tensor]:
    """The algorithm as the paper writes it, one step of all hosts after the other."""
    topology = Topology.declared(counts)
    hosts = [Host(host.ranks) for host in topology.hosts]
    size, number = topology.size, len(hosts)
    shares = Shares(COUNT, size, BATCH)
    x, y = data().tensors

    weights = torch.tensor([len(host.ranks) / size for host in hosts], dtype=torch.float64)

    def mean(of: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Over the hosts, each counted by its workers."""
        return [
            torch.tensordot(weights, torch.stack(same), dims=1) for same in zip(*of, strict=True)
        ]

    def everything() -> None:
        """All in step: parameters and momentum."""
        average = mean([[p.detach() for p in host.model.parameters()] for host in hosts])
        momentum = mean(
            [[host.optimizer.state[p]["momentum_buffer"] for p in host.model.parameters()]
             for host in hosts]
        )  # fmt: skip
        for host in hosts:
            for p, value, buffer in zip(host.model.parameters(), average, momentum, strict=True):
                p.data.copy_(value)
                host.optimizer.state[p]["momentum_buffer"].copy_(buffer)

    sent: list[torch.Tensor] | None = None
    age = since = 0
    cycling = False
    for epoch in range(EPOCHS):
        order = torch.tensor(shuffled(COUNT, 0, epoch))
        for step in range(shares.steps):
            progress = (epoch + step / shares.steps) / EPOCHS
            now = daso.warmup <= progress < 1 - daso.cooldown
            if cycling and not now:
                if sent is not None:
                    merge(hosts, sent, age, number)
                    sent = None
                everything()
            if now and not cycling:
                since = 0
            cycling = now
            gradients = []
            for host in hosts:
                host.optimizer.zero_grad()
                for rank in host.ranks:
                    part = order[list(shares.share(step, rank))]
                    weight = shares.share_weight(step, rank)
                    loss = F.cross_entropy(host.model(x[part]), y[part])
                    (loss * weight / len(host.ranks)).backward()
                gradients.append([p.grad.clone() for p in host.model.parameters()])  # type: ignore[union-attr]
            average = mean(gradients)
            for host in hosts:
                if not cycling:
                    for p, value in zip(host.model.parameters(), average, strict=True):
                        p.grad = value.clone()
                host.optimizer.step()
            if not cycling:
                continue
            since += 1
            age += 1
            if sent is not None and age >= (daso.wait or max(1, daso.every // 4)):
                merge(hosts, sent, age, number)
                sent = None
            if sent is None and since >= daso.every:
                sent = mean([[p.detach().clone() for p in h.model.parameters()] for h in hosts])
                age = since = 0
        if cycling:
            if sent is not None:
                merge(hosts, sent, age, number)
                sent = None
            everything()
            since = 0
    return [p.detach() for p in hosts[0].model.parameters()]


def merge(hosts: Sequence[Host], average: Sequence[torch.Tensor], age: int, number: int) -> None:
    for host in hosts:
        for p, value in zip(host.model.parameters(), average, strict=True):
            p.data.copy_((2 * age * p.data + number * value) / (2 * age + number))


@settings(max_examples=12)
@given(
    counts=st.sampled_from([(1, 1), (2, 2), (3, 1), (1, 2, 1), (2, 1, 2)]),
    every=st.integers(1, 5),
    wait=st.sampled_from([None, 1, 2, 4, 7]),
    warmup=st.sampled_from([0.0, 0.2, 0.5]),
    cooldown=st.sampled_from([0.0, 0.3]),
)
def test_it_is_what_the_paper_says(
    tmp_path_factory: pytest.TempPathFactory,
    counts: tuple[int, ...],
    every: int,
    wait: int | None,
    warmup: float,
    cooldown: float,
) -> None:
    daso = Daso(every=every, wait=wait, warmup=warmup, cooldown=cooldown, patience=99)
    found = run_world(
        sum(counts),
        train,
        folder=tmp_path_factory.mktemp("daso"),
        sync=daso,
        topology=Topology.declared(counts),
    )
    expected = simulated(daso, counts)
    for rank in found:
        for value, wanted in zip(rank, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


def test_without_cycling_it_is_all_reduce(tmp_path: Path) -> None:
    """Warm-up and cool-down are synchronous: the whole run is, where they meet."""
    hosts = Topology.declared([2, 1])
    daso = Daso(warmup=0.5, cooldown=0.5)
    ours = run_world(3, train, folder=tmp_path / "a", sync=daso, topology=hosts)
    theirs = run_world(3, train, folder=tmp_path / "b", sync=AllReduce(), topology=hosts)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_a_codec_rounds_what_travels_and_not_the_weights(tmp_path: Path) -> None:
    """Hosts whose models are the same stay the same, to the bit, however coarse the codec."""
    seen: list[bool] = []

    def body(run: Run) -> None:
        model = nn.Linear(40, 40)
        with torch.no_grad():
            model.weight.copy_(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))
        before = model.weight.detach().clone()
        wrapped, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.0))
        for _ in run.epochs(2):
            for (x,) in run.loader(TensorDataset(torch.randn(32, 40)), batch_size=2):
                opt.zero_grad()
                loss = wrapped(x).square().mean()
                loss.backward()
                run.observe_loss(loss)
                opt.step()
        seen.append(torch.equal(before, model.weight))

    sync = parse("daso:every=2,warmup=0,codec=int8")
    run_world(2, body, folder=tmp_path, sync=sync, topology=Topology.declared([1, 1]))
    assert seen == [True, True]


def test_a_coarse_codec_costs_little(tmp_path: Path) -> None:
    hosts = Topology.declared([2, 2])
    plain = run_world(4, train, folder=tmp_path / "a", sync=Daso(), topology=hosts)
    coded = run_world(4, train, folder=tmp_path / "b", sync=Daso(codec="bf16"), topology=hosts)
    for one, other in zip(plain[0], coded[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


class Odd(nn.Module):
    """Frozen, shared, empty and very small parameters, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.into = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.back(torch.tanh(self.into(self.frozen(x)))))) * self.scale


def odd() -> nn.Module:
    model = Odd().double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() * 0.2)
    return model


def test_odd_models_end_in_step(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[bool, bool]:
        held: list[nn.Module] = []

        def make() -> nn.Module:
            held.append(odd())
            return held[0]

        train(run, make)
        assert isinstance(held[0], Odd)
        return bool(run.check_in_step(held[0])), held[0].back.weight is held[0].into.weight

    sync = Daso(every=2, warmup=0.0, cooldown=0.0)
    found = run_world(3, body, folder=tmp_path, sync=sync, topology=Topology.declared([2, 1]))
    assert found == [(True, True)] * 3  # the statistics of BatchNorm too


def test_bytes_between_hosts_are_few(tmp_path: Path) -> None:
    """One worker of each host sends, every 4 steps."""

    def body(run: Run) -> int:
        model = network()
        wrapped, opt = run.distribute(model, optimizer_of(model))
        before = run.group.meter.bytes_sent
        for x, y in run.loader(data(), global_batch_size=2):
            opt.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            opt.step()
        return run.group.meter.bytes_sent - before

    hosts = Topology.declared([1, 1])
    few = run_world(2, body, folder=tmp_path / "a", sync=Daso(warmup=0.0), topology=hosts)
    many = run_world(2, body, folder=tmp_path / "b", sync=AllReduce(), topology=hosts)
    assert 0 < few[0] < many[0] / 2


def test_one_host_falls_back_to_all_reduce_with_one_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = run_world(2, train, folder=tmp_path / "a", sync=Daso())
    said = [str(one.message) for one in caught if "daso is for several hosts" in str(one.message)]
    assert len(said) == 1
    assert "--pretend-hosts 2" in said[0]
    theirs = run_world(2, train, folder=tmp_path / "b", sync=AllReduce())
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_a_loss_that_nobody_reports_is_asked_for(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = network()
        wrapped, opt = run.distribute(model, optimizer_of(model))
        source = data()
        for _ in run.epochs(3):
            for x, y in run.loader(source, global_batch_size=BATCH):
                opt.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                opt.step()

    with pytest.raises(UserError, match=r"run\.observe_loss\(loss\)"):
        run_world(2, body, folder=tmp_path, sync=Daso(), topology=Topology.declared([1, 1]))


def test_a_loss_that_is_only_logged_will_do(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = network()
        wrapped, opt = run.distribute(model, optimizer_of(model))
        source = data()
        for _ in run.epochs(5):
            for x, y in run.loader(source, global_batch_size=BATCH):
                opt.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                opt.step()
            run.log(loss=1.0)

    sync = Daso(patience=1, warmup=0.0, cooldown=0.0)
    run_world(2, body, folder=tmp_path, sync=sync, topology=Topology.declared([1, 1]))
    text = (tmp_path / "world" / "metrics.jsonl").read_text()
    assert '"period": 2, "wait": 1' in text
    assert "not 5% better than 1 in 1 epochs" in text


def test_data_that_come_by_another_way_are_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = network()
        wrapped, opt = run.distribute(model, optimizer_of(model))
        wrapped(data().tensors[0]).sum().backward()
        opt.step()

    with pytest.raises(UserError, match=r"run\.loader"):
        run_world(2, body, folder=tmp_path, sync=Daso(), topology=Topology.declared([1, 1]))


@pytest.mark.filterwarnings("ignore:rank 1, step 3")
@pytest.mark.parametrize("warmup", [0.0, 0.9])
def test_a_gradient_that_is_not_finite_stops_all_hosts(tmp_path: Path, warmup: float) -> None:
    states: dict[int, list[torch.Tensor]] = {}

    def body(run: Run) -> None:
        model = network()
        wrapped, opt = run.distribute(model, optimizer_of(model))
        states[run.rank] = list(model.parameters())
        source = data()
        for _ in run.epochs(2):
            for step, (x, y) in enumerate(run.loader(source, global_batch_size=BATCH)):
                if step == 2 and run.rank == 1:
                    x = x * float("nan")
                opt.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                opt.step()

    sync = Daso(warmup=warmup, every=1)
    with pytest.raises(DivergedError, match="rank 1, step 3: its gradient of"):
        run_world(4, body, folder=tmp_path, sync=sync, topology=Topology.declared([2, 2]))
    for parameters in states.values():
        assert all(torch.isfinite(p).all() for p in parameters)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("daso:every=0", "every=0 must be at least 1"),
        ("daso:wait=0", "wait=0 must be at least 1"),
        ("daso:warmup=1.5", "warmup=1.5 must be a share"),
        ("daso:warmup=0.7,cooldown=0.7", "more than the whole run"),
        ("daso:codec=zip", "zip"),
        ("daso:evry=4", "Did you mean 'every'"),
    ],
)
def test_options_that_cannot_work(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(text)


LEAVING = """
import torch, farandole as fd
from torch.utils.data import TensorDataset

run = fd.init(timeout=150)
model = torch.nn.Linear(600, 600)
model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
data = TensorDataset(torch.randn(80, 600))
for step, (x,) in enumerate(run.loader(data, batch_size=2)):
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    run.observe_loss(loss)
    opt.step()
    if step == 4:  # an exchange has begun, and will not be merged
        break
print("left")
"""


def test_leaving_in_the_middle_of_an_exchange(
    sandbox: Sandbox, two_ranks: list[dict[str, str]]
) -> None:
    said = {
        "FARANDOLE_SYNC": "daso:warmup=0,every=5,wait=5",
        "FARANDOLE_PRETEND_HOSTS": "2",
        "FARANDOLE_TRANSPORT": "c10d",
    }
    script = sandbox.script("leaving.py", LEAVING)
    ends = sandbox.by_hand([rank | said for rank in two_ranks], script)
    assert [(end.returncode, end.stdout.count("left")) for end in ends] == [(0, 1)] * 2, ends

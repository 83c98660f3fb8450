"""Slower workers get fewer samples of a step; the steps stay those of one worker alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import farandole as fd
from farandole.data import Loader, Shares, speed_shares
from farandole.data.speed_shares import SpeedMeasure, is_worth_it, quotas
from farandole.errors import UserError
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run

ROWS, BATCH, EPOCHS = 200, 12, 2
SPEEDS = [250.0, 250.0, 100.0]  # of the ranks of a test, whatever this machine does


@given(speeds=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8), more=st.integers(0, 60))
def test_quotas_make_up_the_batch_and_follow_the_speeds(speeds: list[float], more: int) -> None:
    batch = len(speeds) + more
    found = quotas(speeds, batch)
    assert sum(found) == batch
    assert min(found) >= 1
    for one, fast in zip(found, speeds, strict=True):
        for other, slow in zip(found, speeds, strict=True):
            assert one >= other - 1 or fast <= slow
            # Moving one sample from one rank to another would not end the step sooner.
            assert (
                one == 1
                or one / fast <= (other + 1) / slow * (1 + 1e-9)
                or one / fast <= max(n / s for n, s in zip(found, speeds, strict=True))
            )


def test_quotas_by_hand() -> None:
    assert quotas([3, 3, 1, 3], 40) == (12, 12, 4, 12)
    assert quotas([1, 1, 1], 7) == (3, 2, 2)
    assert quotas([1000, 1], 4) == (3, 1)
    assert is_worth_it([3, 1], [5, 5], [7, 3])
    assert not is_worth_it([100, 101], [50, 50], [49, 51])


@st.composite
def uneven_cuts(draw: st.DrawFn) -> Shares:
    parts = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    evaluates = draw(st.booleans())
    count = draw(st.integers(len(parts), 150))
    return Shares(count, len(parts), sum(parts), evaluates=evaluates, quotas=parts)


@given(cut=uneven_cuts())
def test_uneven_shares_use_every_sample_once(cut: Shares) -> None:
    for step in range(cut.steps):
        whole = cut.global_range(step)
        shares = [cut.share(step, rank) for rank in range(cut.size)]
        assert min(map(len, shares)) >= 1
        if len(whole) >= cut.size:
            assert [i for share in shares for i in share] == list(whole)
        if len(whole) == cut.global_batch:
            assert tuple(map(len, shares)) == cut.quotas
        weights = [cut.share_weight(step, rank) for rank in range(cut.size)]
        assert sum(weights) == pytest.approx(cut.size)


def test_a_speed_is_that_of_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], [0.0]
    monkeypatch.setattr(speed_shares.time, "perf_counter", lambda: now[0])
    measure = SpeedMeasure(lambda: waited[0], lambda: None)
    measure.begin_dealing()
    for step in range(10):
        assert not measure.is_due
        now[0] += 50.0 if step == 0 else 2.0  # the first one is not measured
        waited[0] += 1.5 if step else 0.0
        measure.end_step(4.0, readers=1)
        now[0] += 7.0  # between steps
        measure.begin_step()
    assert measure.is_due
    assert measure.take() == pytest.approx(4.0 / 0.5)
    assert not measure.has_measured
    for _ in range(39):
        measure.end_step(4.0, readers=2)  # nobody's own
    assert not measure.is_due


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=generator)


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def measured(loader: Loader, rank: int) -> Loader:
    """As if this rank had its speed of `SPEEDS`."""
    assert loader._speeds is not None
    loader._speeds.measure.take = _Taken(loader._speeds.measure, SPEEDS[rank])  # type: ignore[method-assign]
    return loader


class _Taken:
    def __init__(self, measure: SpeedMeasure, speed: float) -> None:
        self._take, self._speed = measure.take, speed

    def __call__(self) -> float:
        self._take()
        return self._speed


def train(run: Run, base: nn.Module, **options: Any) -> Any:
    x, y = rows()
    model = copy.deepcopy(base)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    loader = run.loader(TensorDataset(x, y, torch.arange(ROWS)), global_batch_size=BATCH, **options)
    if options and run.size > 1:
        measured(loader, run.rank)
    seen: list[list[list[int]]] = []
    for epoch in run.epochs(EPOCHS):
        seen.append([])
        for inputs, labels, numbers in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            seen[-1].append(numbers.tolist())
        run.log(epoch=epoch, loss=0.0)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return seen, weights, loader.batch_size


@pytest.mark.parametrize("processes", [0, 1])
def test_weights_are_those_of_one_worker(tmp_path: Path, processes: int) -> None:
    base = network()
    ((serial, expected, _),) = run_world(1, lambda run: train(run, base), folder=tmp_path / "alone")
    found = run_world(
        3,
        lambda run: train(run, base, shares="speed", num_workers=processes),
        folder=tmp_path / "three",
    )
    for _, weights, _ in found:
        assert (weights - expected).abs().max() < 1e-10
    assert [size for *_, size in found] == [5, 5, 2]
    for epoch in range(EPOCHS):
        for step, batch in enumerate(serial[epoch]):
            parts = [seen[epoch][step] for seen, _, _ in found]
            assert [n for part in parts for n in part][: len(batch)] == batch
            if len(batch) == BATCH:
                even = epoch == 0 and step < 10
                assert list(map(len, parts)) == ([4, 4, 4] if even else [5, 5, 2])
    log = next((tmp_path / "three").rglob("metrics.jsonl")).read_text()
    (note,) = [each for line in log.splitlines() if (each := json.loads(line))["event"] == "sync"]
    assert note["sync"] == {"shares": "5 5 2", "samples_per_second": "250 250 100"}


def test_a_resumed_epoch_goes_on_with_the_shares_or_on_other_ranks(tmp_path: Path) -> None:
    def first(run: Run) -> Any:
        loader = measured(
            run.loader(range(ROWS), global_batch_size=BATCH, shares="speed"),  # type: ignore[arg-type]
            run.rank,
        )
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number == 12:
                return seen, loader.state_dict()
        return None

    def rest(run: Run, state: dict[str, Any]) -> Any:
        loader = run.loader(range(ROWS), global_batch_size=BATCH, shares="speed")  # type: ignore[arg-type]
        loader.load_state_dict(state)
        size = loader.batch_size
        return [n for batch in loader for n in batch.tolist()], size

    begun = run_world(3, first, folder=tmp_path / "first")
    state = begun[0][1]
    assert state["speeds"].tolist() == SPEEDS
    before = [n for seen, _ in begun for n in seen]
    for size, sizes in ((3, [5, 5, 2]), (2, [6, 6])):
        ended = run_world(size, lambda run: rest(run, state), folder=tmp_path / f"{size}")
        assert [found for _, found in ended] == sizes
        after = {n for seen, _ in ended for n in seen}  # the tail of 8 is read whole by none twice
        assert sorted(before) == sorted(set(before))
        assert after | set(before) == set(range(ROWS))
        assert not after & set(before)


def test_chunks_are_shared_by_speed_from_the_next_epoch_on(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(ROWS))
    data = [fd.data.array(tmp_path / "rows.npy", chunk_bytes=64, window=4) for _ in SPEEDS]

    def body(run: Run) -> Any:
        own = data[run.rank]
        loader = measured(run.loader(own, global_batch_size=BATCH, shares="speed"), run.rank)
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        return epochs, own.chunks_read

    found = run_world(3, body, folder=tmp_path)
    for epoch, sizes in ((0, [4, 4, 4]), (1, [5, 5, 2])):
        assert [len(epochs[epoch][0]) for epochs, _ in found] == sizes
        seen = [n for epochs, _ in found for batch in epochs[epoch][:-1] for n in batch]
        last = {n for epochs, _ in found for n in epochs[epoch][-1]}
        assert sorted([*seen, *last]) == list(range(ROWS))
    chunks = len(data[0].chunk_sizes)
    assert sum(read for _, read in found) <= 2 * (chunks + 2) + 3 * 4  # lanes are those of speed


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(30))


def test_where_speed_makes_no_sense_it_is_refused(tmp_path: Path) -> None:
    def local(run: Run) -> Any:
        model = network()
        run.distribute(model, torch.optim.SGD(model.parameters(), 0.1), sync=parse("local:every=2"))
        next(iter(run.loader(TensorDataset(*rows()), 4, shares="speed")))

    with pytest.raises(UserError, match=r"shares='speed' with --sync local:every=2: .*allreduce"):
        run_world(2, local, folder=tmp_path)

    def staged(run: Run) -> Any:
        trainer = run.trainer(
            [nn.Linear(5, 5), nn.Linear(5, 3)],
            F.cross_entropy,
            lambda ps: torch.optim.SGD(ps, 0.1),
            layout="stages=2",
        )
        next(iter(trainer.loader(TensorDataset(*rows()), 4, shares="speed")))

    with pytest.raises(UserError, match=r"shares='speed' with layout .*stages=2"):
        run_world(2, staged, folder=tmp_path)

    def others(run: Run) -> None:
        with pytest.raises(UserError, match="iterable dataset"):
            run.loader(Endless(), 4, shares="speed")
        with pytest.raises(UserError, match=r"shares='fast': shares are equal or speed"):
            run.loader(TensorDataset(*rows()), 4, shares="fast")

    run_world(1, others, folder=tmp_path)

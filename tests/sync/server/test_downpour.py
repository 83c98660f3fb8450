"""The strategy `downpour`: when it pushes, fetches and waits, and what the servers make of it.

No two runs of it are the same. With a loss whose gradient is 1 everywhere the servers' end is: the
k-th push of p gradients moves a weight by rate · p / sqrt(k · p²), whoever it comes from.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import CommError, DivergedError, UserError
from farandole.sync import Downpour, parse
from farandole.sync.server.table import ParameterTable
from farandole.testing import run_world
from farandole.train import Run

RATE, GAIN, START = 0.5, 0.1, 3.0


def slope(
    run: Run,
    steps: int,
    *,
    epochs: int = 1,
    before: Callable[[int], Any] = lambda step: None,
    save_after: int | None = None,
    load: bool = False,
) -> float:
    """Goes down a slope of 1; returns where the servers are in the end."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, START + 50 * load)
    wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), RATE))
    if load:
        run.load()
    data = TensorDataset(torch.ones(steps * run.size, 1, dtype=torch.float64))
    for _ in run.epochs(epochs):
        for step, (x,) in enumerate(run.loader(data, batch_size=1)):
            before(step)
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
            if step + 1 == save_after and not load:
                run.save()
        assert run.check_in_step(wrapped)
    return float(model.weight.detach())


def end_after(pushes: int) -> Any:
    """Where the servers are after so many pushes of the same sum."""
    moved = sum(RATE * GAIN / math.sqrt(k) for k in range(1, pushes + 1))
    return pytest.approx(START - moved, abs=1e-9)


@pytest.mark.parametrize(("push", "steps", "pushes"), [(1, 4, 4), (2, 6, 3), (3, 9, 3)])
def test_the_servers_get_what_was_accrued(
    push: int, steps: int, pushes: int, tmp_path: Path
) -> None:
    sync = Downpour(push=push, fetch=2)
    ends = run_world(3, lambda run: slope(run, steps), folder=tmp_path, sync=sync)
    assert ends == [end_after(3 * pushes)] * 3


def test_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 steps: pushes after 2, 4 and 6, and of the rest; fetches after 3 and 6."""
    reads: Counter[str] = Counter()
    start_read = ParameterTable.start_read

    def counted(part: ParameterTable, **needs: Any) -> Any:
        reads[step[0]] += 1
        return start_read(part, **needs)

    step = ["before"]
    monkeypatch.setattr(ParameterTable, "start_read", counted)

    def body(run: Run) -> int:
        def before(number: int) -> None:
            step[0] = f"step {number + 1}"

        slope(run, 7, before=before)
        store = run._session.models.synchronizers[0]._store  # type: ignore[attr-defined]
        return int(store.updates("model 0 float64"))

    (pushes,) = run_world(1, body, folder=tmp_path, sync=Downpour(push=2, fetch=3))
    assert pushes == 4
    assert [reads[f"step {number}"] for number in range(1, 7)] == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("steps", [6, 2])  # 2: the pass is over before the warm start is
def test_the_others_wait_for_the_warm_start(steps: int, tmp_path: Path) -> None:
    warmstart, taken = 4, []
    at_first: list[int] = []

    def body(run: Run) -> float:
        def before(step: int) -> None:
            if run.rank == 0:
                taken.append(step)
            elif step == 0:
                at_first.append(len(taken))

        return slope(run, steps, epochs=2, before=before)

    ends = run_world(3, body, folder=tmp_path, sync=Downpour(warmstart=warmstart))
    assert ends == [end_after(3 * 2 * steps)] * 3
    assert len(at_first) == 2 * 2
    assert min(at_first[:2]) >= min(warmstart, steps)


def test_a_warm_start_ends_where_all_must_meet(tmp_path: Path) -> None:
    """To save, in this case."""
    sync = Downpour(warmstart=5)
    ends = run_world(2, lambda run: slope(run, 6, save_after=2), folder=tmp_path, sync=sync)
    assert ends == [end_after(12)] * 2


def test_a_warm_start_that_does_not_end(tmp_path: Path) -> None:
    failed = threading.Event()

    def body(run: Run) -> None:
        def before(step: int) -> None:
            if run.rank == 0 and step == 1:
                failed.wait(20)

        try:
            slope(run, 6, before=before)
        finally:
            failed.set()

    message = "rank 1 waits for the end of rank 0's warm start.* step 1 of 3 for 1 s"
    with pytest.raises(CommError, match=message):
        run_world(
            2, body, folder=tmp_path, sync=Downpour(warmstart=3), timeout=timedelta(seconds=1)
        )


@pytest.mark.parametrize("save_after", [2, 6])
def test_going_on(save_after: int, tmp_path: Path) -> None:
    """Adagrad's sums are the servers' too; what was accrued and not yet pushed is kept."""
    sync = Downpour(push=4, fetch=3)

    def whole(run: Run) -> float:
        return slope(run, 8, save_after=save_after)

    def rest(run: Run) -> float:
        return slope(run, 8, save_after=save_after, load=True)

    for body in (whole, rest):
        assert run_world(2, body, folder=tmp_path, sync=sync) == [end_after(4)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("downpour:push=0", "push=0 must be at least 1"),
        ("downpour:fetch=-1", "fetch=-1 must be at least 1"),
        ("downpour:warmstart=-1", "warmstart=-1 must be at least 0"),
        ("downpour:gain=0", "gain=0 must be above 0"),
        ("downpour:gain=-2", "gain=-2 must be above 0"),
        ("downpour:push=often", "push='often' is not a"),
        ("downpour:fetsh=2", "no option 'fetsh'.*Did you mean 'fetch'"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_text_and_back() -> None:
    sync = Downpour(push=2, fetch=3, warmstart=10, gain=0.5)
    assert str(sync) == "downpour:push=2,fetch=3,warmstart=10,gain=0.5"
    assert parse(str(sync)) == sync


def test_no_gain_is_infinite() -> None:
    with pytest.raises(UserError, match="gain=inf"):
        Downpour(gain=math.inf)


def test_it_needs_the_optimizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="downpour counts the optimizer's steps"):
        run_world(2, lambda run: run.distribute(nn.Linear(1, 1)), folder=tmp_path, sync=Downpour())


def test_what_is_not_finite_goes_nowhere(tmp_path: Path) -> None:
    models: dict[int, nn.Module] = {}

    def body(run: Run) -> None:
        model = models[run.rank] = nn.Linear(2, 2)
        wrapped, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for step, (x,) in enumerate(run.loader(TensorDataset(torch.ones(12, 2)), batch_size=2)):
            wrapped(x * (torch.nan if run.rank == 1 and step == 1 else 1)).sum().backward()
            optimizer.step()

    with pytest.raises(DivergedError, match=r"rank 1, step 2: its gradient of 'weight' is not"):
        run_world(2, body, folder=tmp_path, sync=Downpour(push=3))
    assert all(torch.isfinite(parameter).all() for parameter in models[0].parameters())

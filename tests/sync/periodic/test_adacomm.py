"""AdaComm: its rule, fed by made-up meetings; and at work, where every decision is written down."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR
from torch.utils.data import TensorDataset

from farandole.errors import UserError
from farandole.optim.scheduler import RateScheduler
from farandole.sync import AdaComm, Local, Strategy
from farandole.sync.periodic.adacomm import FallingPeriod, defer_rates
from farandole.sync.periodic.meeting import RankStatus
from farandole.testing import run_world
from farandole.train import Run


def status(**values: float) -> RankStatus:
    """Of a rank that has taken steps since the last meeting, at rate 0.1."""
    defaults = {"logged": math.nan, "pending": 1.0, "rate": 0.1}
    return RankStatus(**{**dict.fromkeys(RankStatus._fields, 0.0), **defaults, **values})


class Meetings:
    """One period under test. Each meeting has as many batches as a loss is taken from."""

    def __init__(self, **options: Any) -> None:
        self.period = FallingPeriod(AdaComm(**{"seconds": 10, **options}))
        self.now = 0.0

    def meet(self, loss: float, *, after: float = 10, rate: float = 0.1) -> int:
        """The period after a meeting `after` seconds later."""
        self.now += after
        said = status(
            loss_sum=20 * loss, loss_count=20, seconds=self.now, steps=self.now, rate=rate
        )
        self.note = self.period.after([said, said])
        return self.period.steps


# The rule


def test_the_period_follows_the_root_of_the_loss() -> None:
    meetings = Meetings(start=20)
    assert meetings.meet(4.0, after=1) == 20  # the first loss
    assert meetings.meet(1.0) == 10  # √(1/4) · 20
    assert meetings.note == {"period": 10, "loss": 1.0, "why": "√(1/4)·20 = 10.0"}
    assert meetings.meet(0.5) == 8  # ⌈√(0.5/4) · 20⌉ = ⌈7.07⌉
    assert meetings.meet(0.0) == 1


def test_where_the_loss_does_not_shorten_it_it_shrinks() -> None:
    meetings = Meetings(start=20, shrink=0.6)
    assert meetings.meet(4.0, after=1) == 20
    assert meetings.meet(4.0) == 12  # 20 is no less than 20: 0.6 of it
    assert meetings.note is not None
    assert meetings.note["why"] == "√(4/4)·20 = 20.0, no less than 20: 0.6 of that"
    assert meetings.meet(8.0) == 8  # ⌈7.2⌉
    assert [meetings.meet(4.0) for _ in range(4)] == [5, 3, 2, 2]


def test_a_loss_that_explodes_does_not_lengthen_it() -> None:
    meetings = Meetings(start=20)
    assert meetings.meet(1e-200, after=1) == 20
    assert meetings.meet(1e200) == 10


def test_nothing_is_decided_between() -> None:
    meetings = Meetings(start=16)
    assert meetings.meet(4.0, after=4) == 16
    assert meetings.meet(1.0, after=4) == 16
    assert meetings.note is None
    assert meetings.meet(1.0, after=4) == 8  # 12 seconds since the beginning
    assert meetings.meet(0.25, after=9) == 8
    assert meetings.meet(0.25, after=1) == 4


def test_by_steps_instead_of_seconds() -> None:
    period = FallingPeriod(AdaComm(start=16, steps=100))
    for steps, expected in [(50, 16), (99, 16), (100, 8), (199, 8), (205, 4)]:
        loss = {50: 4.0, 99: 1.0, 100: 1.0}.get(steps, 0.25)
        said = status(steps=steps, loss_sum=20 * loss, loss_count=20, seconds=1e6)
        period.after([status(steps=steps - 7, seconds=1e6), said])  # the rank that is ahead counts
        assert period.steps == expected, steps


def test_rank_0_s_clock_counts() -> None:
    period = FallingPeriod(AdaComm(start=16, seconds=10))
    period.after([status(loss_sum=4, loss_count=1, seconds=9), status(seconds=11)])
    period.after([status(loss_sum=4, loss_count=1, seconds=9.9), status(seconds=50)])
    assert period.steps == 16
    period.after([status(loss_sum=4, loss_count=1, seconds=10), status(seconds=0)])
    assert period.steps == 8


def test_nothing_is_decided_where_nothing_was_learned() -> None:
    """The end of an epoch that ends with a period has two meetings."""
    period = FallingPeriod(AdaComm(start=16, seconds=10))
    loss = {"loss_sum": 4.0, "loss_count": 1.0}
    assert period.after([status(**loss, seconds=11)]) is not None
    assert period.after([status(**loss, seconds=30, pending=0.0)]) is None
    assert period.after([status(**loss, seconds=30)]) is not None


@pytest.mark.parametrize(
    ("rate", "period"),
    [
        ("couple", 15),  # ⌈√(0.1/0.05 · 1/4) · 20⌉ = ⌈14.1⌉
        ("ignore", 10),
        ("defer", 10),
    ],
)
def test_a_falling_rate(rate: str, period: int) -> None:
    meetings = Meetings(start=20, rate=rate)
    assert meetings.meet(4.0, after=1) == 20
    assert meetings.meet(1.0, rate=0.05) == period
    assert meetings.note is not None
    assert ("0.1/0.05·1/4" in meetings.note["why"]) == (rate == "couple")


def test_a_rate_that_first_warms_up_shortens_nothing() -> None:
    meetings = Meetings(start=20)
    assert meetings.meet(4.0, after=1, rate=0.0) == 20
    assert meetings.meet(1.0, rate=0.1) == 10
    assert meetings.meet(0.25, rate=0.05) == 8  # ⌈√(0.1/0.05 · 0.25/4) · 20⌉ = ⌈7.07⌉


def test_a_loss_is_the_mean_of_at_least_twenty_batches() -> None:
    period = FallingPeriod(AdaComm(start=100, seconds=10))

    def meet(loss: float, batches: float, seconds: float) -> dict[str, Any] | None:
        said = status(loss_sum=loss * batches, loss_count=batches, seconds=seconds)
        return period.after([said, said])

    meet(8.0, 10, 1)
    meet(8.0, 10, 2)
    note = meet(2.0, 10, 10)
    assert note is not None
    assert note["loss"] == (8 * 10 + 2 * 10) / 20  # the first meeting is not needed any more
    note = meet(1.0, 40, 20)
    assert note is not None
    assert note["loss"] == 1.0


def test_what_is_logged_counts_where_nothing_is_reported() -> None:
    period = FallingPeriod(AdaComm(start=16, seconds=10))
    assert period.lacks_loss
    period.after([status(seconds=11), status(logged=3, logs=1)])  # another rank's log is not heard
    assert period.lacks_loss
    period.after([status(logged=4, logs=1, seconds=12)])
    assert not period.lacks_loss
    note = period.after([status(logged=1, logs=2, seconds=22)])
    assert note is not None
    assert (note["period"], note["loss"]) == (8, 1)


def test_what_is_logged_does_not_count_where_losses_are_reported() -> None:
    """It may be a loss of another kind, such as that of the test data."""
    period = FallingPeriod(AdaComm(start=16, seconds=10))
    period.after([status(loss_sum=20, loss_count=5, seconds=1)])
    period.after([status(logged=100, logs=1, seconds=2)])  # no batch since the last meeting
    note = period.after([status(loss_sum=5, loss_count=5, seconds=10, logged=100, logs=1)])
    assert note is not None
    assert note["loss"] == 2.5


@pytest.mark.parametrize("logged", [math.nan, math.inf, -math.inf])
def test_a_logged_loss_that_is_no_number_is_not_heard(logged: float) -> None:
    period = FallingPeriod(AdaComm(start=16, seconds=10))
    period.after([status(logged=logged, logs=1, seconds=1)])
    assert period.lacks_loss
    period.after([status(logged=4, logs=2, seconds=2)])
    note = period.after([status(logged=logged, logs=3, seconds=10)])
    assert note is not None
    assert note["loss"] == 4


@given(
    start=st.integers(1, 1000),
    shrink=st.floats(0.01, 0.99),
    coupling=st.sampled_from(["couple", "defer", "ignore"]),
    story=st.lists(
        st.tuples(
            st.floats(-1e9, 1e300), st.floats(0, 1e9), st.floats(0.1, 30)
        ),  # loss, rate, seconds
        max_size=30,
    ),
)
def test_the_period_never_rises_nor_falls_below_one(
    start: int, shrink: float, coupling: str, story: list[tuple[float, float, float]]
) -> None:
    meetings = Meetings(start=start, shrink=shrink, rate=coupling)
    periods = [start]
    for loss, rate, seconds in story:
        periods.append(meetings.meet(loss, rate=rate, after=seconds))
        assert (meetings.note is not None) or periods[-1] == periods[-2]
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] >= 1
    assert all(isinstance(period, int) for period in periods)


def test_a_restored_period_goes_on() -> None:
    whole, cut = Meetings(start=50, rate="couple"), Meetings(start=50, rate="couple")
    story = [(8.0, 0.1), (6.0, 0.1), (4.0, 0.05), (3.0, 0.05), (2.0, 0.01), (1.0, 0.01)]
    for loss, rate in story:
        whole.meet(loss, rate=rate)
        cut.meet(loss, rate=rate)
        other = Meetings(start=50, rate="couple")
        other.period.load_state_dict(json.loads(json.dumps(cut.period.state_dict())))
        other.period.steps, other.now, other.note = cut.period.steps, cut.now, cut.note
        cut = other
    assert cut.period.steps == whole.period.steps
    assert cut.note == whole.note


# Rates that are put off


def multi_step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return MultiStepLR(optimizer, [2, 5], gamma=0.1)


def recipe(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Warms up for two steps, then falls in a line."""

    def curve(step: int) -> float:
        return 0.1 * (step + 1) if step < 2 else 0.3 - 0.02 * step

    return RateScheduler(optimizer, curve, base_rate=0.1, steps_per_epoch=4)


def in_place(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Rates may be tensors."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("make", [multi_step, recipe, in_place])
def test_a_scheduler_is_not_disturbed(make: Callable[[Any], LRScheduler]) -> None:
    """Steps are taken at the highest rates so far until the period is 1; the schedule goes on."""

    def rates(*, deferred: bool, period: FallingPeriod) -> tuple[list[Any], list[Any]]:
        parameters = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)]
        optimizer = torch.optim.SGD(
            [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.02}]
        )
        if deferred:
            defer_rates(optimizer, period)
        scheduler, scheduled, used = make(optimizer), [], []
        for step in range(8):
            period.steps = 4 if step < 6 else 1
            before = [p.item() for p in parameters]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            used.append([b - p.item() for b, p in zip(before, parameters, strict=True)])
            scheduled.append([float(group["lr"]) for group in optimizer.param_groups])
            scheduler.step()
        return scheduled, used

    period = FallingPeriod(AdaComm(rate="defer"))
    plain, plainly_used = rates(deferred=False, period=FallingPeriod(AdaComm()))
    scheduled, used = rates(deferred=True, period=period)
    assert scheduled == plain
    for step, (taken, normal) in enumerate(zip(used, plainly_used, strict=True)):
        highest = [max(column) for column in zip(*plain[: step + 1], strict=True)]
        assert taken == pytest.approx(highest if step < 6 else normal, rel=1e-5)
    assert used[5] != pytest.approx(plainly_used[5])  # so that something was put off at all
    assert period.highest_rates == [max(column) for column in zip(*plain, strict=True)]


# At work


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Linear:
    model = nn.Linear(4, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return model


class Script:
    """8 steps an epoch; the loss is told in one way or another."""

    def __init__(
        self,
        *,
        report: bool = False,
        log: bool = False,
        skip: int | None = None,
        epochs: int = 3,
        look: bool = False,
        meet_epochs: bool = True,
    ) -> None:
        self.report, self.log, self.skip, self.epochs = report, log, skip, epochs
        self.look, self.meet_epochs = look, meet_epochs

    def __call__(self, run: Run) -> list[list[float]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        wrapped, _ = run.distribute(model, optimizer)
        source = data()
        if self.look:
            next(iter(run.loader(source, global_batch_size=4)))
        for epoch in range(self.epochs):
            for x, y in run.loader(source, global_batch_size=4):
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                loss.backward()
                if self.report:
                    run.observe_loss(loss)
                if run.rank != self.skip:
                    optimizer.step()
            mean = run.mean(loss.item())
            run.log(accuracy=0.5, **({"loss": mean} if self.log else {}))
            assert epoch == 0 or self.report or self.log, "the second epoch must not begin"
            assert run.check_in_step(wrapped) or not self.meet_epochs
        return model.weight.tolist()


def notes(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "world" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "sync"]


@pytest.mark.parametrize("how", ["report", "log"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_every_decision_is_written_down(how: str, momentum: float, tmp_path: Path) -> None:
    sync = AdaComm(start=6, steps=7, momentum=momentum)
    ends = run_world(2, Script(**{how: True}), folder=tmp_path, sync=sync)
    assert ends[0] == ends[1]
    found = notes(tmp_path)
    decided = [note["sync"] for note in found]
    assert decided[0] == {"period": 6}
    assert len(decided) > 1
    for before, after in itertools.pairwise(decided):
        assert after["period"] < before["period"] or before["period"] == 1
        assert after["why"].startswith("√(")
        assert math.isfinite(after["loss"])
    steps = [note["steps"] for note in found]
    assert steps == sorted(steps)
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(steps[1:]))


def test_a_decision_between_epochs_is_written_down_too(tmp_path: Path) -> None:
    """The loss is first heard of when the second epoch begins; nobody has met until then."""
    sync = AdaComm(start=16, steps=4, meet_epochs=False)
    run_world(2, Script(log=True, meet_epochs=False), folder=tmp_path, sync=sync)
    periods = [note["sync"]["period"] for note in notes(tmp_path)]
    assert periods[:2] == [16, 8]


def test_it_is_local_sgd_with_that_period(tmp_path: Path) -> None:
    """Where nothing is decided, to the bit."""
    ends: list[Any] = [
        run_world(2, Script(report=True), folder=tmp_path, sync=sync)
        for sync in (AdaComm(start=3, steps=1000), Local(every=3), Local(every=2))
    ]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


@pytest.mark.parametrize(
    ("sync", "script"),
    [
        (AdaComm(start=4), Script()),
        (AdaComm(start=4), Script(look=True)),
        (AdaComm(start=4), Script(skip=1)),  # a rank that has skipped all of its steps
        (AdaComm(start=4, steps=3, meet_epochs=False), Script(meet_epochs=False)),
    ],
)
def test_without_a_loss_the_second_epoch_does_not_begin(
    sync: Strategy, script: Script, tmp_path: Path
) -> None:
    def body(run: Run) -> str:
        with pytest.raises(UserError, match=r"run\.observe_loss\(loss\).*run\.log\(loss") as caught:
            script(run)
        return str(caught.value)

    messages = run_world(2, body, folder=tmp_path, sync=sync)
    assert messages[0] == messages[1]


def test_a_look_at_the_data_is_no_epoch(tmp_path: Path) -> None:
    """Nothing was learned yet that could have a loss."""
    ends = run_world(
        2, Script(log=True, look=True), folder=tmp_path, sync=AdaComm(start=4, steps=8)
    )
    assert ends[0] == ends[1]

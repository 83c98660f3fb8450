"""Elastic state: what is saved, restored and sent, and the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from farandole.horovod.common.elastic import HostUpdateResult, State, run_fn
from farandole.horovod.common.elastic import ObjectState as BareObjectState
from farandole.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from farandole.horovod.torch.elastic import ObjectState, TorchState, run
from farandole.horovod.torch.elastic.state import (
    ModelStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.testing.horovod import run_horovod


def trained(seed: int, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has state. Threads share torch's random state."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.full_like(tensor, seed + number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]])).square().sum().backward()
    optimizer.step()


def values(state: TorchState) -> dict[str, Any]:
    assert state.model is not None
    assert state.optimizer is not None
    buffers = state.optimizer.state_dict()["state"]
    return {
        **{name: tensor.tolist() for name, tensor in state.model.state_dict().items()},
        **{f"momentum.{key}": kept["momentum_buffer"].tolist() for key, kept in buffers.items()},
        "epoch": state.epoch,
        "notes": list(state.notes),
    }


def test_restore_goes_back_to_the_commit_as_often_as_one_likes() -> None:
    def work() -> None:
        state = TorchState(*trained(1), epoch=0, notes=["begun"])
        state.epoch = 3
        state.notes.append("saved")
        state.commit()
        before = values(state)
        assert before["notes"] == ["begun", "saved"]
        for _ in range(2):  # the second shows whether the first gave the copy away
            for _ in range(2):
                step(state.model, state.optimizer)
            state.epoch += 1
            state.notes.append("lost")
            assert values(state) != before
            state.restore()
            assert values(state) == before

    run_horovod(1, work)


def test_sync_gives_everyone_rank_0s_state_as_it_is_now() -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any]]:
        state = TorchState(*trained(hvd.rank()), epoch=hvd.rank(), notes=[hvd.rank()])
        if hvd.rank() == 0:
            step(state.model, state.optimizer)
            state.epoch = 7
        state.sync()
        synced = values(state)
        step(state.model, state.optimizer)
        state.restore()
        return synced, values(state)

    for synced, restored in (ranks := run_horovod(3, work)):
        assert synced == restored == ranks[0][0]
        assert synced["epoch"] == 7
        assert synced["notes"] == [0]


def test_what_is_assigned_is_part_of_the_state() -> None:
    def work() -> None:
        state = TorchState(*trained(1), epoch=0, notes=[])
        model, optimizer = trained(5)
        state.model, state.optimizer = model, optimizer
        before = values(state)
        step(model, optimizer)
        state.restore()
        assert state.model is model
        assert values(state) == before

    run_horovod(1, work)


def test_a_state_of_plain_values_and_one_without_a_model() -> None:
    def work() -> tuple[object, ...]:
        plain = ObjectState(batch=hvd.rank(), best=None)
        plain.sync()
        plain.batch = 9
        plain.restore()
        empty = TorchState(generator=nn.Linear(1, 1), step=4)
        empty.sync()
        return plain.batch, plain.best, empty.model, empty.step, empty.generator.weight.tolist()

    first, second = run_horovod(2, work)
    assert first == second
    assert first[:4] == (0, None, None, 4)


@pytest.fixture
def registry() -> Iterator[None]:
    before = get_handler_registry()
    yield
    set_handler_registry(before)


@pytest.mark.usefixtures("registry")
def test_a_handler_of_ones_own() -> None:
    class Counts:
        count = 1

    class CountsHandler(StateHandler[Counts]):
        saved = 0

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

    set_handler_registry([(Counts, CountsHandler), *get_handler_registry()])
    assert get_handler_registry()[1] == (nn.Module, ModelStateHandler)

    def work() -> None:
        state = TorchState(counts=Counts())
        state.save()
        state.counts.count = 2
        state.restore()
        assert state.counts.count == 1

    run_horovod(1, work)


@pytest.mark.parametrize(
    ("update", "skip_sync"),
    [
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ],
)
def test_all_ranks_hear_of_changed_hosts_at_the_same_commit(
    update: list[HostUpdateResult], skip_sync: bool
) -> None:
    def work() -> list[object]:
        state = ObjectState(step=0)
        seen: list[object] = []
        for state.step in range(3):
            if state.step == 1:
                if hvd.rank() == 1:
                    state.on_hosts_updated(0.0, HostUpdateResult.added)  # not its business
                for result in update if hvd.rank() == 0 else ():
                    state.on_hosts_updated(0.0, result)
            try:
                state.commit()
                seen.append("went on")
            except HostsUpdatedInterrupt as interrupt:
                seen.append(interrupt.skip_sync)
        return seen

    assert run_horovod(2, work) == [["went on", skip_sync, "went on"]] * 2


class Noted(State):
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        super().__init__(bcast_object=lambda value: value, get_rank=lambda: 0)
        self.calls: list[str] = []

    def save(self) -> None:
        self.calls.append("save")

    def restore(self) -> None:
        self.calls.append("restore")

    def sync(self) -> None:
        self.calls.append("sync")

    def regroup(self) -> None:
        self.calls.append("regroup")


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had been started by the elastic launcher."""
    monkeypatch.setenv("FARANDOLE_ELASTIC_WORKER", "0")
    monkeypatch.setenv("FARANDOLE_ELASTIC_STATE", "")  # so that it is taken away again


def run_noted(*errors: Exception, anyone: Callable[[bool], bool] = bool) -> list[str]:
    state = Noted()
    state.register_reset_callbacks([lambda: state.calls.append("callback")])
    left = iter(errors)

    def train(given: State, word: str) -> str:
        assert given is state
        state.calls.append("train")
        for error in left:
            raise error
        return word

    result = run_fn(train, lambda: state.calls.append("reset"), anyone)(state, word="done")
    assert result == "done"
    return state.calls


AGAIN = ["reset", "callback"]


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize(
    ("error", "then"),
    [
        (HorovodInternalError("a rank died"), ["restore", *AGAIN, "sync"]),
        (HostsUpdatedInterrupt(skip_sync=False), [*AGAIN, "sync"]),
        (HostsUpdatedInterrupt(skip_sync=True), [*AGAIN, "regroup"]),
    ],
)
def test_the_loop(error: Exception, then: list[str]) -> None:
    assert run_noted(error) == ["sync", "train", *then, "train"]


@pytest.mark.usefixtures("elastic")
def test_all_sync_when_one_needs_it() -> None:
    calls = run_noted(HostsUpdatedInterrupt(skip_sync=True), anyone=lambda mine: True)
    assert calls == ["sync", "train", *AGAIN, "sync", "train"]


@pytest.mark.usefixtures("elastic")
def test_a_worker_that_dies_while_the_state_is_sent() -> None:
    failures = iter([HorovodInternalError("a rank died")])

    class Breaking(Noted):
        def sync(self) -> None:
            super().sync()
            for error in failures:
                raise error

    state = Breaking()
    run_fn(lambda state: state.calls.append("train"), lambda: state.calls.append("reset"))(state)
    assert state.calls == ["sync", "restore", "reset", "sync", "train"]


def test_without_an_elastic_launcher_the_error_is_the_users_and_the_state_is_the_commits() -> None:
    def work() -> int:
        state = BareObjectState(hvd.broadcast_object, hvd.rank, step=1)

        @run
        def train(state: BareObjectState) -> None:
            state.commit()
            state.step = 2
            raise HorovodInternalError("rank 1 died")

        with pytest.raises(HorovodInternalError, match="rank 1 died"):
            train(state)
        return int(state.step)

    assert run_horovod(2, work) == [1, 1]

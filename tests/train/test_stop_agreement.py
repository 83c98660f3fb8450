"""All ranks stop in the same place, whoever hears of the request when."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train.run import Run
from farandole.train.stopping.agreement import MeetingAgreement, StoreAgreement
from farandole.worker.grace import Grace, grace_seconds


@given(size=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_through_a_store(size: int, seed: int) -> None:
    """Ranks run at their own speeds, far apart; each notices the request at a time of its own."""
    draw = random.Random(seed)
    store = HashStore()
    ranks = [StoreAgreement(store, rank, size) for rank in range(size)]
    places = [0] * size
    notices = [False] * size
    stopped: dict[int, int] = {}
    ranks[draw.randrange(size)].request(signal.SIGTERM)
    for _ in range(10_000):
        running = [rank for rank in range(size) if rank not in stopped]
        if not running:
            break
        rank = draw.choice(running)
        places[rank] += 1
        notices[rank] = notices[rank] or (
            draw.random() < 0.2 and ranks[rank].requested() is not None
        )
        if notices[rank] and ranks[rank].stops_at(places[rank]) == signal.SIGTERM:
            stopped[rank] = places[rank]
    assert len(stopped) == size
    assert len(set(stopped.values())) == 1


def test_the_first_request_counts() -> None:
    store = HashStore()
    first, second = (StoreAgreement(store, rank, 2) for rank in range(2))
    assert second.requested() is None
    first.request(signal.SIGUSR1)
    second.request(signal.SIGTERM)
    assert first.requested() == second.requested() == signal.SIGUSR1


def test_ranks_that_died_are_not_waited_for_under_servers() -> None:
    one = StoreAgreement(HashStore(), 0, 3, patience_seconds=-1.0)
    one.request(signal.SIGTERM)
    assert one.stops_at(5) is None
    assert one.stops_at(6) == signal.SIGTERM


def test_without_a_store_ranks_meet(tmp_path: Path) -> None:
    def body(run: Run) -> list[int]:
        agreement = MeetingAgreement(run.group)
        if run.rank == 1:
            agreement.request(signal.SIGUSR1)
        for place in range(1, 1000):
            number = agreement.stops_at(place)
            if number is not None:
                return [place, number]
        return []

    found = run_world(3, body, folder=tmp_path)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == signal.SIGUSR1


def test_the_time_that_a_worker_is_told() -> None:
    assert grace_seconds({}) == 30
    assert grace_seconds({"FARANDOLE_GRACE": "2.5"}) == 2.5
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        with pytest.raises(UserError, match="FARANDOLE_GRACE"):
            grace_seconds({"FARANDOLE_GRACE": wrong})


def test_one_more_signal_ends_the_grace() -> None:
    received = ["SIGTERM"]
    grace = Grace(3600, received)
    received.append("SIGTERM")  # at once: the same request
    assert not grace.is_over()
    grace._began -= 10
    assert not grace.is_over()
    received.append("SIGTERM")
    assert grace.is_over()
    grace = Grace(1)
    grace._began -= 10
    assert grace.is_over()

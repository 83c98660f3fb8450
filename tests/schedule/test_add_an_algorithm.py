"""Adding an all-reduce: one function, registered, is checked, priced, run and found by name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from threading import Thread

import numpy as np
import pytest
import torch

from farandole.comm import Exchange, Group, InProcess
from farandole.errors import UserError
from farandole.schedule import (
    ALGORITHMS,
    Link,
    Round,
    Schedule,
    build,
    check,
    cost_seconds,
    register,
)
from farandole.sync import parse
from farandole.topology import Topology


def along_a_line(ranks: int, topology: Topology | None = None) -> Schedule:
    """Everything goes up the line, and the sum comes down again.

    ```
    3 ranks, 1 chunk      0    1    2
    rounds 0, 1, add      ───► ───►
    rounds 2, 3, copy     ◄─── ◄───
    ```
    """
    up = [Round.of(*_pair(rank, rank + 1), 0, 1, "add") for rank in range(ranks - 1)]
    down = [Round.of(*_pair(rank, rank - 1), 0, 1, "copy") for rank in range(ranks - 1, 0, -1)]
    return Schedule("line", ranks, chunks=1, rounds=(*up, *down))


def _pair(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([source], dtype=np.int32), np.array([target], dtype=np.int32)


@pytest.fixture
def line() -> Iterator[str]:
    register("line", along_a_line)
    yield "line"
    ALGORITHMS.remove("line")


@pytest.mark.parametrize("ranks", range(1, 9))
def test_it_is_proved(line: str, ranks: int) -> None:
    check(build(line, ranks))


def test_it_has_a_price(line: str) -> None:
    link = Link(1.0, 0.0)
    assert cost_seconds(build(line, 4), 1000, link) == pytest.approx(6.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_runs(line: str, ranks: int) -> None:
    exchange, sums = Exchange(ranks, timedelta(seconds=150)), {}

    def work(rank: int) -> None:
        mine = torch.arange(5.0) + rank
        sums[rank] = Group(InProcess(exchange, rank)).all_reduce(mine, algorithm=line)

    threads = [Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = ranks * torch.arange(5.0) + sum(range(ranks))
    assert all(torch.equal(sums[rank], expected) for rank in range(ranks))


def test_strategies_take_it_by_name(line: str) -> None:
    assert str(parse("allreduce:algorithm=line")) == "allreduce:algorithm=line"


def test_it_is_unknown_before_and_after() -> None:
    with pytest.raises(UserError, match="no all-reduce algorithm 'line'"):
        build("line", 4)

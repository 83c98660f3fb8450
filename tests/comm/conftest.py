"""Bare groups of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from farandole.comm import Exchange, Group, InProcess
from farandole.topology import Topology

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    """`on_ranks(3, body)`: calls `body(group)` on each of 3 ranks; what it returned or raised."""

    def call(
        size: int,
        body: Callable[[Group], Any],
        timeout_seconds: float = 30.0,
        topology: Topology | None = None,
    ) -> list[Any]:
        exchange = Exchange(size, timedelta(seconds=timeout_seconds))
        results: list[Any] = [None] * size

        def work(rank: int) -> None:
            torch.set_num_threads(1)  # in this thread; else each rank has helpers of its own
            group = Group(InProcess(exchange, rank, topology))
            try:
                results[rank] = body(group)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call

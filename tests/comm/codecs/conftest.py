"""Ranks as threads, for codecs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from farandole.comm import Exchange, Group, InProcess

OnRanks = Callable[[int, Callable[[Group], Any]], list[Any]]


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    """`on_ranks(3, body)`: what `body(group)` returned on each of three ranks."""

    def call(size: int, body: Callable[[Group], Any]) -> list[Any]:
        exchange = Exchange(size, timedelta(seconds=150))
        results: list[Any] = [None] * size
        failures: list[Exception] = []

        def work(rank: int) -> None:
            try:
                results[rank] = body(Group(InProcess(exchange, rank)))
            except Exception as error:
                failures.append(error)
                exchange.fail(rank, f"failed: {error}")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    return call

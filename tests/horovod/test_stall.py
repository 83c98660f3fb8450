"""Whom is waited for: when it is said, and when the job ends."""

from __future__ import annotations

from farandole.horovod.engine.requests import ALLREDUCE, Request
from farandole.horovod.engine.stall import StallWatch
from farandole.horovod.engine.table import NOTHING, Announcement, Table


def table_with(*names: str, size: int = 3) -> Table:
    table = Table(size, 64)
    requests = tuple(Request(name, ALLREDUCE) for name in names)
    table.hear([Announcement(requests), *[NOTHING] * (size - 1)], now=100.0)
    return table


def test_a_report_names_the_tensor_and_the_ranks() -> None:
    watch = StallWatch(table_with("x", "y"), 10.0, 0.0)
    assert watch.report(109.0) == ""
    said = watch.report(111.0)
    assert said.startswith("for more than 10 s some ranks have been waiting")
    assert "\n  x: asked for by rank 0, missing from ranks 1, 2\n  y: asked for by rank 0" in said
    assert watch.report(112.0) == ""  # not again at once
    assert watch.report(122.0) == said


def test_a_long_list_is_cut() -> None:
    said = StallWatch(table_with(*map(str, range(11))), 10.0, 0.0).report(200.0)
    assert said.count("missing from") == 8
    assert said.endswith("… and 3 more")


def test_the_end_of_a_job() -> None:
    watch = StallWatch(table_with("x"), 10.0, 20.0)
    assert watch.fatal(119.0) == ""
    assert watch.fatal(121.0) == (
        "rank 0 waited more than 20 s for ranks 1, 2 to ask for 'x' "
        "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
    )


def test_never() -> None:
    watch = StallWatch(table_with("x"), 0.0, 0.0)
    assert watch.report(1e9) == watch.fatal(1e9) == ""


def test_nothing_to_tell() -> None:
    watch = StallWatch(Table(2, 64), 10.0, 20.0)
    assert watch.report(1e9) == watch.fatal(1e9) == ""

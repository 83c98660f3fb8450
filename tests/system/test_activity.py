"""What a worker lets its launcher see."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from farandole.system.activity import SharedActivity, read_activity


def waits(path: Path) -> bool:
    seen = read_activity(path)
    assert seen is not None
    return seen.waits


def comes_to(path: Path, expected: bool) -> bool:
    deadline = time.monotonic() + 20
    while waits(path) is not expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return waits(path) is expected


def test_a_gpu_that_waits_for_others_is_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    activity = SharedActivity(path, prints_stacks=False)
    over = threading.Event()
    for _ in range(2):
        over.clear()
        activity.needs_others(over.is_set)
        assert comes_to(path, True)
        activity.begin_wait()
        over.set()
        time.sleep(0.6)
        assert waits(path)  # in another way
        activity.end_wait()
        assert comes_to(path, False)


def test_what_was_over_at_once_was_no_wait(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    activity = SharedActivity(path, prints_stacks=False)
    activity.needs_others(lambda: True)
    time.sleep(0.6)
    assert not waits(path)

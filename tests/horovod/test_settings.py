"""The HOROVOD_* variables."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from farandole.errors import UserError
from farandole.horovod.settings import Settings


def test_without_variables() -> None:
    assert Settings.from_environ({}) == Settings()
    assert Settings.from_environ({"HOROVOD_CYCLE_TIME": "", "HOROVOD_TIMELINE": ""}) == Settings()


def test_every_variable() -> None:
    found = Settings.from_environ(
        {
            "HOROVOD_FUSION_THRESHOLD": "1024",
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_CACHE_CAPACITY": "7",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "11",
            "HOROVOD_TIMELINE": "a/b.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_AUTOTUNE": "true",
            "HOROVOD_AUTOTUNE_LOG": "log.csv",
        }
    )
    assert found == Settings(
        fusion_bytes=1024,
        cycle_seconds=0.0025,
        cache_capacity=7,
        stall_warning_seconds=3.0,
        stall_shutdown_seconds=9.0,
        timeout=timedelta(seconds=11),
        timeline=Path("a/b.json"),
        mark_cycles=True,
        autotune=True,
        autotune_log=Path("log.csv"),
    )


def test_no_stall_check_at_all() -> None:
    found = Settings.from_environ(
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    )
    assert (found.stall_warning_seconds, found.stall_shutdown_seconds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("FUSION_THRESHOLD", "much", "HOROVOD_FUSION_THRESHOLD='much' is not a number"),
        ("CYCLE_TIME", "-1", "HOROVOD_CYCLE_TIME=-1 must be 0 or more"),
        ("CACHE_CAPACITY", "nan", "HOROVOD_CACHE_CAPACITY=nan must be 0 or more"),
        ("CACHE_CAPACITY", "inf", "HOROVOD_CACHE_CAPACITY=inf"),
        ("GLOO_TIMEOUT_SECONDS", "0", "HOROVOD_GLOO_TIMEOUT_SECONDS=0 must be 0.1 or more"),
        ("GLOO_TIMEOUT_SECONDS", "inf", "HOROVOD_GLOO_TIMEOUT_SECONDS=inf"),
    ],
)
def test_what_makes_no_sense(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings.from_environ({f"HOROVOD_{name}": text})

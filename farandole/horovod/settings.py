"""What HOROVOD_* variables set, read once, when `hvd.init()` is called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from farandole.errors import UserError


@dataclass(frozen=True)
class Settings:
    """The defaults are Horovod's, apart from the timeout, which there is 30 s, and from what is
    reduced in one go, there 128 MiB: less stays in the caches, and is faster by a few per cent."""

    fusion_bytes: int = 8 * 2**20
    cycle_seconds: float = 0.001
    cache_capacity: int = 1024
    stall_warning_seconds: float = 60.0  # 0: never
    stall_shutdown_seconds: float = 0.0  # 0: never
    timeout: timedelta = timedelta(seconds=120)
    timeline: Path | None = None
    mark_cycles: bool = False
    autotune: bool = False
    autotune_log: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        def number(name: str, default: float, least: float = 0.0) -> float:
            text = environ.get(f"HOROVOD_{name}", "")
            try:
                value = float(text) if text else default
            except ValueError:
                raise UserError(f"HOROVOD_{name}={text!r} is not a number.") from None
            if not (math.isfinite(value) and value >= least):
                raise UserError(f"HOROVOD_{name}={text} must be {least:g} or more, and finite.")
            return value

        def flag(name: str) -> bool:
            return environ.get(f"HOROVOD_{name}", "").lower() in ("1", "true", "yes", "on")

        def path(name: str) -> Path | None:
            text = environ.get(f"HOROVOD_{name}", "")
            return Path(text) if text else None

        quiet = flag("STALL_CHECK_DISABLE")
        usual = cls()
        return cls(
            fusion_bytes=int(number("FUSION_THRESHOLD", usual.fusion_bytes)),
            cycle_seconds=number("CYCLE_TIME", usual.cycle_seconds * 1000) / 1000,
            cache_capacity=int(number("CACHE_CAPACITY", usual.cache_capacity)),
            stall_warning_seconds=0.0
            if quiet
            else number("STALL_CHECK_TIME_SECONDS", usual.stall_warning_seconds),
            stall_shutdown_seconds=0.0
            if quiet
            else number("STALL_SHUTDOWN_TIME_SECONDS", usual.stall_shutdown_seconds),
            timeout=timedelta(
                seconds=number("GLOO_TIMEOUT_SECONDS", usual.timeout.total_seconds(), 0.1)
            ),
            timeline=path("TIMELINE"),
            mark_cycles=flag("TIMELINE_MARK_CYCLES"),
            autotune=flag("AUTOTUNE"),
            autotune_log=path("AUTOTUNE_LOG"),
        )

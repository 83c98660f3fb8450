"""What the flags mean to a worker: the HOROVOD_* variables that `hvd.init()` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farandole.errors import UserError


def _mebibytes(value: int) -> str:
    return str(value * 2**20)


def _switch(value: bool) -> str:
    return "1" if value else "0"


def _path(value: Path | str) -> str:
    """Whole: a script may go to another folder before it calls `hvd.init()`."""
    return str(Path(value).absolute())


def _upper(value: str) -> str:
    return value.upper()


_VARIABLES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "fusion_threshold_mb": ("HOROVOD_FUSION_THRESHOLD", _mebibytes),
    "cycle_time_ms": ("HOROVOD_CYCLE_TIME", str),
    "cache_capacity": ("HOROVOD_CACHE_CAPACITY", str),
    "gloo_timeout_seconds": ("HOROVOD_GLOO_TIMEOUT_SECONDS", str),
    "autotune": ("HOROVOD_AUTOTUNE", _switch),
    "autotune_log_file": ("HOROVOD_AUTOTUNE_LOG", _path),
    "timeline_filename": ("HOROVOD_TIMELINE", _path),
    "timeline_mark_cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", _switch),
    "no_stall_check": ("HOROVOD_STALL_CHECK_DISABLE", _switch),
    "stall_check_warning_time_seconds": ("HOROVOD_STALL_CHECK_TIME_SECONDS", str),
    "stall_check_shutdown_time_seconds": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str),
    "log_level": ("HOROVOD_LOG_LEVEL", _upper),
}

_NOT_NEGATIVE = (
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
)

NO_EFFECT = {
    "disable_cache": "nothing is asked of the hosts beforehand, so nothing is remembered",
    "tcp": "on one host workers share memory, and between hosts it is TCP anyway",
    "mpi_threads_disable": "no thread of ours calls MPI",
    "hierarchical_allreduce": "ranks of one host share memory, and only then hosts talk",
    "hierarchical_allgather": "ranks of one host share memory, and only then hosts talk",
    "num_nccl_streams": "PyTorch decides on NCCL's streams",
    "thread_affinity": "no thread is bound to a core; bind the workers: taskset, or --mpi",
    "autotune_warmup_samples": "--autotune needs no such setting",
    "autotune_steps_per_sample": "--autotune needs no such setting",
    "autotune_bayes_opt_max_samples": "--autotune needs no such setting",
    "autotune_gaussian_process_noise": "--autotune needs no such setting",
    "log_with_timestamp": "-prefix-timestamp puts the time before every line",
    "no_log_hide_timestamp": "-prefix-timestamp puts the time before every line",
    "cooldown": "a host that fails again and again is left out for good",
}
"""Flags that change nothing here, and why."""


def horovod_variables(flags: Mapping[str, Any]) -> dict[str, str]:
    """Of those flags that are given. Raises `UserError` for a value that cannot be."""
    for name in _NOT_NEGATIVE:
        if flags[name] is not None and flags[name] < 0:
            raise UserError(f"{spelling(name)} {flags[name]}: it must be 0 or more.")
    if flags["gloo_timeout_seconds"] is not None and flags["gloo_timeout_seconds"] < 1:
        raise UserError("--gloo-timeout-seconds: give 1 or more.")
    return {
        variable: write(flags[name])
        for name, (variable, write) in _VARIABLES.items()
        if flags[name] is not None
    }


def spelling(name: str) -> str:
    """How a flag is written."""
    special = {
        "cooldown": "--blacklist-cooldown-range",
        "slots": "--slots-per-host",
        "timed": "--prefix-output-with-timestamp",
        "interfaces": "--network-interfaces",
        "no_log_hide_timestamp": "--log-hide-timestamp",
    }
    return special.get(name, f"--{name.replace('_', '-')}")


def default_seconds(name: str, usual: int) -> int:
    """A timeout that HOROVOD_* may set where no flag does."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else usual
    except ValueError:
        raise UserError(f"{name}={text!r} is not a number of seconds.") from None

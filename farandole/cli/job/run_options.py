"""The options of `farandole run`, as one object for the steps that make a job of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.launch.placement.placement import HostOptions


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options as given; None: not given."""

    where: HostOptions
    workers: int | None
    per_gpu: str | None
    gpu_threads: float | None
    layout: str | None
    sync: str | None
    name: str | None
    runs: Path | None
    checkpoint: str | None
    fallback: bool
    seed: int | None
    choose: tuple[str, ...]
    transport: str | None
    pretend_hosts: str | None
    link: str | None
    no_check_finite: bool
    trace: Path | None
    servers: str | None
    replicas: int | None
    functions: tuple[str, ...]
    key_file: Path | None
    restarts: int
    min_workers: int | None
    max_workers: int | None
    replace_stragglers: bool
    elastic_wait: float
    host_silence: float
    exit_timeout: float | None
    stall: float | None
    stall_kill: bool
    grace: float
    horovod: bool
    no_fork: bool
    module: bool
    script: str
    arguments: tuple[str, ...]

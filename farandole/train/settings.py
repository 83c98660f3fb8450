"""What the command line says to a script: read from the variables that `farandole run` sets."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole.comm import check_transport
from farandole.environment import (
    BENCH_DATA,
    CHECK_FINITE,
    CHECKPOINT,
    CHOOSE,
    FALLBACK,
    LAYOUT,
    NAME,
    PERTURBED,
    PRETEND_HOSTS,
    RUNS,
    SCRIPT,
    SEED,
    SIMULATED_LINK,
    SIMULATED_LINK_FILE,
    SYNC,
    TRACE,
    TRACE_PARTS,
    TRANSPORT,
    TRIAL,
    UNTIL_EPOCH,
)
from farandole.errors import FarandoleError, UserError
from farandole.layout.layout import Layout, parse_layout
from farandole.network_link import NetworkLink
from farandole.options import read_chosen
from farandole.schedule import piece
from farandole.sync import Strategy, parse
from farandole.topology import Topology
from farandole.train.checkpoint.automatic.policy import Checkpoints, parse_checkpoints

WHOLE = "whole"
"""The word for the layout that is none: the whole model on every worker."""


@dataclass(frozen=True)
class Settings:
    """None means: not said, the script decides."""

    sync: Strategy | None = None
    layout: Layout | None = None
    name: str | None = None
    folder: Path | None = None
    seed: int | None = None
    script: str | None = None
    fallback: bool = False
    transport: str | None = None
    pretend_hosts: str | None = None
    simulated_link: NetworkLink | None = None  # between the pretended hosts
    simulated_link_file: Path | None = None
    check_finite: bool | None = None
    checkpoints: Checkpoints | None = None
    trace: Path | None = None
    trace_parts: Path | None = None
    bench_data: tuple[Path, int, int] | None = None  # for `BenchLoader`
    chosen: Mapping[str, str] = field(default_factory=dict)  # for `run.choose`
    trial: Path | None = None  # of a study
    until_epoch: int | None = None  # where this part of the training ends
    perturbed: bool = False  # the optimizer keeps the script's settings when it loads

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        raw_seed = environ.get(SEED)
        try:
            seed = int(raw_seed) if raw_seed else None
        except ValueError:
            raise UserError(f"{SEED}={raw_seed!r} is not a whole number.") from None
        return cls(
            sync=parse(environ[SYNC]) if environ.get(SYNC) else None,
            layout=read_layout(environ[LAYOUT]) if environ.get(LAYOUT) else None,
            name=environ.get(NAME) or None,
            folder=Path(environ[RUNS]) if environ.get(RUNS) else None,
            seed=seed,
            script=environ.get(SCRIPT) or None,
            fallback=environ.get(FALLBACK, "") not in ("", "0"),
            transport=check_transport(environ[TRANSPORT]) if environ.get(TRANSPORT) else None,
            pretend_hosts=environ.get(PRETEND_HOSTS) or None,
            simulated_link=(
                NetworkLink.read(environ[SIMULATED_LINK]) if environ.get(SIMULATED_LINK) else None
            ),
            simulated_link_file=(
                Path(environ[SIMULATED_LINK_FILE]) if environ.get(SIMULATED_LINK_FILE) else None
            ),
            check_finite=_read_switch(CHECK_FINITE, environ),
            checkpoints=parse_checkpoints(environ[CHECKPOINT]) if environ.get(CHECKPOINT) else None,
            trace=Path(environ[TRACE]) if environ.get(TRACE) else None,
            trace_parts=Path(environ[TRACE_PARTS]) if environ.get(TRACE_PARTS) else None,
            bench_data=_read_bench(environ[BENCH_DATA]) if environ.get(BENCH_DATA) else None,
            chosen=read_chosen(environ.get(CHOOSE, "")),
            trial=Path(environ[TRIAL]) if environ.get(TRIAL) else None,
            until_epoch=int(environ[UNTIL_EPOCH]) if environ.get(UNTIL_EPOCH) else None,
            perturbed=environ.get(PERTURBED) == "1",
        )


def _read_bench(text: str) -> tuple[Path, int, int]:
    batches, warm_up, path = text.split(",", 2)
    return Path(path), int(batches), int(warm_up)


def _read_switch(name: str, environ: Mapping[str, str]) -> bool | None:
    said = environ.get(name)
    if said not in (None, "", "0", "1"):
        raise UserError(f"{name}={said!r} is neither 0 nor 1.")
    return said == "1" if said else None


def read_layout(text: str) -> Layout:
    """`stages=4,microbatches=8`, or `whole`: the whole model on every worker, as `Layout()` is.

    Raises `UserError` for a layout that cannot be.
    """
    if text.strip() == WHOLE:
        return Layout()
    if not text.strip():
        raise UserError(f"an empty layout: write stages=4,microbatches=8, say, or {WHOLE}.")
    try:
        return parse_layout(text)
    except UserError as error:
        if "=" in text:
            raise
        raise UserError(f"{error} For the whole model on every worker write {WHOLE}.") from None


def write_layout(layout: Layout) -> str:
    """What `read_layout` reads, in its shortest form."""
    return WHOLE if layout == Layout() else str(layout)


def check_workers(layout: Layout, workers: int) -> None:
    """Raises `UserError` when the workers do not make whole replicas, with a number that does."""
    if layout.stages == "auto" or workers % layout.ranks == 0:
        return
    below = workers - workers % layout.ranks
    works = [count for count in (below, below + layout.ranks) if count > 0]
    nearest = min(works, key=lambda count: abs(count - workers))
    raise UserError(
        f"layout {layout}: one replica takes {layout.ranks} workers, and {workers} is no multiple "
        f"of that. The nearest number of workers that is: -n {nearest}."
    )


def check_goes_with(layout: Layout, strategy: Strategy) -> None:
    """Raises `UserError` for a strategy that cannot keep replicas of this layout in step."""
    if layout != Layout() and (strategy.needs_servers or strategy.name == "hogwild"):
        raise UserError(
            f"{strategy} keeps one whole model for all workers, and layout {layout} gives them "
            "different stages. Take another --sync, or leave the layout out."
        )
    if layout.batchnorm == "deferred" and getattr(strategy, "batchnorm", "local") == "sync":
        raise UserError(
            f"{strategy} shares BatchNorm's statistics over replicas in every micro-batch, and "
            "layout batchnorm=deferred moves them once a step. Leave out one of the two."
        )


def pretended_hosts(text: str, workers: int) -> Topology:
    """`2`: so many hosts, with as many workers each as possible; `3,1`: the workers of each."""
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        raise UserError(
            f"--pretend-hosts {text!r}: give a number of hosts, such as 2, or the workers of each, "
            "such as 3,1."
        ) from None
    if len(counts) == 1:
        if not 1 <= counts[0] <= workers:
            raise UserError(
                f"--pretend-hosts {text}: {workers} workers sit on 1 to {workers} hosts."
            )
        counts = [len(piece(host, counts[0], workers)) for host in range(counts[0])]
    if sum(counts) != workers:
        raise UserError(
            f"--pretend-hosts {text}: that makes {sum(counts)} workers, and there are {workers}."
        )
    return Topology.declared(counts)


def check_name(name: str) -> str:
    """A run's name is a folder below the folder of runs, and must not lead out of it."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"the name {name!r} leads out of the folder of runs; give a plain name.")
    return name


def check_writable(folder: Path) -> None:
    """Finds out before the training, not after its first epoch. Leaves nothing behind."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> FarandoleError:
    """The error to raise when a run cannot write to its folder."""
    return FarandoleError(
        f"cannot write metrics to {folder}: {error}. Start in a folder you can write to, or "
        "pass fd.init(folder=…) or `farandole run --runs …`."
    )


def default_name(script: str) -> str:
    """`digits-20260131-235959` for `examples/digits.py`.

    Bytes of the script's name that are no characters here become `_`: the name is printed, and is
    that of a folder for libraries that take characters only.
    """
    stem = re.sub(r"[\ud800-\udfff]+", "_", Path(script).stem)
    return f"{stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"

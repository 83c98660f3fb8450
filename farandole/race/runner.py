"""Runs the same script under each scheme, one after another, and follows what they log.

Each lane is a `farandole run` of its own, in its own processes, with the same seed and arguments.
So nothing carries over from one to the next. The race only reads the metrics that the lanes write.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from farandole.launch.nested_runs import PATIENCE_SECONDS, WarmProcesses, problem_of
from farandole.launch.outcome_file import read_outcome
from farandole.launch.placement.placement import HostOptions, place
from farandole.report.history import Follower, History
from farandole.report.interactive.timeline import TRACE_NAME
from farandole.report.lane import Lane, outcome_of
from farandole.report.metrics import FILE_NAME
from farandole.report.target import Target
from farandole.system.ending import end_process
from farandole.worker.grace import DEFAULT_SECONDS

_POLL_SECONDS = 0.25
_LONGEST_NAME = 100  # of a folder: a file system takes 255 bytes, and a list of cuts may be longer


@dataclass(frozen=True)
class Entry:
    """One scheme in the race, in the user's own words. None is left to the script."""

    sync: str | None
    workers: int
    needs_servers: bool = False
    layout: str | None = None

    @property
    def serial(self) -> bool:
        """Neither a strategy nor a layout: the plain script on one worker."""
        return self.sync is None and self.layout is None

    @property
    def place(self) -> str | None:
        """Where the model lives. On one worker no layout of the script's own would fit."""
        return "whole" if self.serial else self.layout

    @property
    def name(self) -> str:
        """As the user typed it."""
        words = ("serial",) if self.serial else (self.layout, self.sync)
        return " · ".join(filter(None, words))


@dataclass(frozen=True)
class RaceConfig:
    """What every lane runs, and where it leaves its traces."""

    command: Sequence[str]  # the script and its arguments
    folder: Path
    seed: int
    pretend_hosts: str | None = None  # as the workers are said to sit
    servers: int | None = None  # for the entries that need them
    replicas: int | None = None
    link: str | None = None  # simulated, between the pretended hosts
    where: HostOptions = field(default_factory=HostOptions)
    checkpoint: str | None = None  # when each lane saves, in its own folder
    stall_seconds: float | None = None
    grace_seconds: float = DEFAULT_SECONDS
    stop_at: Target | None = None  # a lane that has reached it is stopped
    budget_seconds: float | None = None  # of each lane, with its start
    price: float | None = None  # of a worker-hour
    trace: bool = False  # each lane leaves a timeline in its folder
    folder_suffix: str = ""  # tells the runs of one lane apart
    warm: WarmProcesses = field(default_factory=WarmProcesses, compare=False)

    def arguments(self, entry: Entry) -> list[str]:
        """What to type after `farandole` to run one entry alone.

        The serial lane too gets the hosts: its one worker is on the first of them.
        """
        sync = ["--sync", entry.sync] if entry.sync else []
        layout = ["--layout", entry.place] if entry.place else []
        pretended = self.pretend_hosts if not entry.serial else None
        hosts = ["--pretend-hosts", pretended] if pretended else []
        hosts += ["--link", self.link] if pretended and self.link else []
        servers: list[str] = []
        if entry.needs_servers:
            given = {"--servers": self.servers, "--replicas": self.replicas}
            for option, value in given.items():
                servers += [option, str(value)] if value is not None else []
        run = ["run", "-n", str(entry.workers), *self.where.words(), *hosts]
        saves = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        run += [*layout, *sync, *servers, *saves, *self._limits]
        return [*run, "--seed", str(self.seed), *self.command]

    def workers_here(self, entry: Entry) -> int:
        """How many of its workers are on this host."""
        placement = place(self.where, entry.workers)
        return entry.workers if placement is None else placement.workers_here

    @property
    def _limits(self) -> list[str]:
        stall = [] if self.stall_seconds is None else ["--stall", f"{self.stall_seconds:g}"]
        is_usual = self.grace_seconds == DEFAULT_SECONDS
        return [*stall, *([] if is_usual else ["--grace", f"{self.grace_seconds:g}"])]

    def lane(self, entry: Entry) -> Lane:
        """The lane before it has started."""
        text = shlex.join(["farandole", *self.arguments(entry)])
        return Lane(
            "serial" if entry.serial else entry.sync or "",
            entry.workers,
            "waiting",
            History(),
            command=text,
            layout=entry.layout or "",
            seed=self.seed,
            price=self.price,
        )

    def enough(self, history: History, seconds: float) -> str:
        """Why a lane need not go on after so many seconds; empty: it must."""
        if self.stop_at is not None and self.stop_at.reached(history) is not None:
            return f"stopped at the target, {self.stop_at}"
        if self.budget_seconds is not None and seconds > self.budget_seconds:
            return f"stopped after its budget of {self.budget_seconds:g} s"
        return ""


def run_lane(config: RaceConfig, entry: Entry, number: int) -> Iterator[Lane]:
    """Runs one entry; yields the lane as it stands, about four times a second, then at its end.

    Closing the iterator early, or an exception in the loop that consumes it, stops the workers.
    """
    lane = config.lane(entry)
    name = folder_name(number, lane) + config.folder_suffix
    place = config.folder / name
    lane = replace(lane, folder=place)
    shutil.rmtree(place, ignore_errors=True)  # what an interrupted race has left
    place.mkdir(parents=True, exist_ok=True)
    output = place / "output.log"
    _, *rest = config.arguments(entry)
    command = [sys.executable, "-m", "farandole", "run", "--name", name]
    ended = place / ".outcome.json"
    traced = ["--trace", str(place / TRACE_NAME)] if config.trace else []
    command += ["--runs", str(config.folder), "--outcome-file", str(ended), *traced, *rest]
    follower = Follower(place / FILE_NAME)
    with output.open("wb") as sink:
        process = config.warm.start(command, config.workers_here(entry), sink)
    began = time.monotonic()
    try:
        while True:
            try:
                code: int | None = process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            history = follower.poll()
            lane = replace(lane, history=history, outcome=outcome_of(history, code))
            if code is not None:
                break
            if enough := config.enough(history, time.monotonic() - began):
                end_process(process, config.grace_seconds + PATIENCE_SECONDS)
                yield replace(lane, history=follower.poll(), outcome="stopped", problem=enough)
                return
            yield lane
        problem = "" if lane.outcome == "ok" else problem_of(output, code, read_outcome(ended))
        yield replace(lane, problem=problem)
    finally:
        ended.unlink(missing_ok=True)
        if process.poll() is None:
            end_process(process, config.grace_seconds + PATIENCE_SECONDS)


def folder_name(number: int, lane: Lane) -> str:
    """`2-stages-4-microbatches-8-daso`: distinct by its number, readable by the rest."""
    return re.sub(r"[\W_]+", "-", f"{number}-{lane.name}")[:_LONGEST_NAME].strip("-")


def interrupted(lane: Lane) -> Lane:
    """A lane that was running when the race was stopped."""
    return replace(lane, outcome="unfinished", problem="stopped before its end")

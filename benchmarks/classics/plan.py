"""Which races redraw the literature: their lanes, links and arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

# Relative to the root, where races are started: the page shows them.
TRAIN = Path("benchmarks/classics/train.py")
LINK_RACE = Path("examples/link_race.py")


@dataclass(frozen=True)
class Race:
    """One `farandole race`. All its lanes get the same arguments."""

    name: str
    lanes: tuple[str, ...]
    arguments: str
    target: str
    link: str
    workers: int = 2
    seeds: int = 3
    serial: bool = False
    script: Path = TRAIN
    budget_seconds: float = 75.0  # of a lane: a run that hangs must not hold up the others

    def command(self) -> list[str]:
        """What follows `farandole race`, but for the folder and the seeds."""
        words = ["-n", str(self.workers), "--pretend-hosts", "2", "--link", self.link]
        words += ["--serial"] if self.serial else []
        words += ["--budget", f"{self.budget_seconds:g}"]
        for lane in self.lanes:
            words += ["--lane", lane]
        return [*words, "--target", self.target, str(self.script), *self.arguments.split()]

    def tiny(self) -> Race:
        """The same lanes with a few steps each: whether all of it works, not how fast."""
        shorter = {"passes": 3, "steps": 10, "seconds": 4, "epochs": 2, "warmup": 1}
        arguments = self.arguments
        for option, value in shorter.items():
            arguments = re.sub(rf"--{option} \S+", f"--{option} {value}", arguments)
        return replace(self, arguments=arguments, seeds=1)


# Hogwild shares memory, so it has no lane: the race refuses it between hosts.
STRATEGIES = Race(
    "strategies",
    (
        "allreduce",
        "allreduce:codec=int8",
        "lagged",
        "local:every=8",
        "postlocal:at=0.3",
        "adacomm:start=16,steps=64",
        "diloco:every=32",
        "federated:every=8",
        "daso",
        "server:staleness=2",
        "server:async",
        "downpour:gain=0.02",
        "stages=2,microbatches=4,schedule=gpipe",
        "stages=2,schedule=pipedream",
    ),
    "--hidden 128 128 --batch 64 --steps 64 --passes 10 --rate 0.1",
    target="error=0.2",
    link="400mbit,1ms",
    serial=True,
)

PERIODS = (1, 4, 16, 64)
ADACOMM = Race(
    "adacomm",
    (*(f"local:every={period}" for period in PERIODS), "adacomm:start=64,seconds=5"),
    "--hidden 64 --batch 8 --steps 128 --rate 0.1 --noise 0.2 --passes 1000 --seconds 22",
    target="loss=1.2",
    link="100mbit,1ms",
)

STALENESS = Race(
    "staleness",
    (
        "server:staleness=bsp",
        *(f"server:staleness={bound}" for bound in (1, 2, 8)),
        "server:async",
    ),
    "--hidden 64 --batch 64 --steps 100 --passes 6 --rate 0.1 --momentum 0.5 --pause 40 --slow 0.5",
    target="error=0.2",
    link="200mbit,1ms",
    workers=4,
)

LANES_OF_PIPELINES = (
    "allreduce",
    "stages=2,schedule=layer",
    "stages=2,microbatches=4,schedule=gpipe",
    "stages=2,microbatches=4,schedule=1f1b",
    "stages=2,schedule=pipedream",
)
DENSE = Race(
    "pipelines_dense",
    LANES_OF_PIPELINES,
    "--hidden 256 256 256 --batch 128 --steps 40 --passes 6 --rate 0.1",
    target="error=0.2",
    link="200mbit,1ms",
)
CONVOLUTIONAL = Race(
    "pipelines_convolutional",
    LANES_OF_PIPELINES,
    "--epochs 5",
    target="accuracy=0.95",
    link="200mbit,1ms",
    script=LINK_RACE,
)


def batch_race(name: str, batch: int, more: str = "") -> Race:
    steps = 8192 // batch
    return Race(
        name,
        ("allreduce",),
        f"--hidden 128 128 --batch {batch} --steps {steps} --passes 12 --rate 0.0125 "
        f"--momentum 0.9 {more}",
        target="error=0.2",
        link="1gbit,1ms",
    )


BATCHES = (
    batch_race("batch_32", 32),
    batch_race("batch_1024_same_rate", 1024),
    batch_race("batch_1024_scaled", 1024, "--base-batch 32"),
    batch_race("batch_1024_scaled_warmup", 1024, "--base-batch 32 --warmup 5"),
)

PIECES: dict[str, tuple[Race, ...]] = {
    "strategies": (STRATEGIES,),
    "adacomm": (ADACOMM,),
    "staleness": (STALENESS,),
    "pipelines": (DENSE, CONVOLUTIONAL),
    "large_batch": BATCHES,
}

"""How a job of each setting is started: the words of its command, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FARANDOLE = (sys.executable, "-m", "farandole")
NAME = "drilled"


@dataclass(frozen=True)
class Setting:
    """`words` come between the command and the script."""

    words: tuple[str, ...] = ()
    command: str = "run"
    workers: int = 2
    weights: bool = True  # whether an undisturbed run always gives the same ones
    says: str = ""  # for people

    def line(self, extra: tuple[str, ...] = (), script: Path = HERE / "train.py") -> list[str]:
        """The whole command. `extra` are further options of the launcher."""
        if self.command == "race":
            words = ("race", "-n", str(self.workers), *self.words, *extra, str(script))
        elif self.command == "horovodrun":
            program = (sys.executable, str(script.with_name("elastic.py")))
            words = ("horovodrun", "-np", str(self.workers), *self.words, *extra, *program)
        elif self.command == "emulate":
            inner = (*FARANDOLE, "run", "-n", "1", str(script))
            words = ("emulate", "--hosts", "2", *self.words, *extra, "--", *inner)
        else:
            words = (
                "run",
                "-n",
                str(self.workers),
                "--name",
                NAME,
                *self.words,
                *extra,
                str(script),
            )
        return [*FARANDOLE, *words]


ELASTIC = ("--min-np", "1", "--max-np", "2", "--host-discovery-script", "./hosts.sh")

SETTINGS: Mapping[str, Setting] = {
    "allreduce": Setting(),
    "codec": Setting(("--sync", "allreduce:codec=int8")),
    "c10d": Setting(("--transport", "c10d")),
    "local": Setting(("--sync", "local:every=2")),
    "lagged": Setting(("--sync", "lagged")),
    "daso": Setting(("--sync", "daso", "--pretend-hosts", "2")),
    "hogwild": Setting(("--sync", "hogwild"), weights=False),
    "stages": Setting(("--layout", "stages=2,microbatches=2")),
    "gems": Setting(("--layout", "stages=2,microbatches=2,schedule=gems")),
    "tiles": Setting(("--layout", "tiles=2x1")),
    "server": Setting(("--sync", "server:staleness=4"), weights=False),
    "async": Setting(("--sync", "server:async", "--servers", "2"), weights=False),
    "downpour": Setting(("--sync", "downpour", "--servers", "2"), weights=False),
    "race": Setting(("--sync", "allreduce", "--sync", "local:every=2"), "race", weights=False),
    "elastic": Setting((*ELASTIC, "--gloo-timeout-seconds", "5"), "horovodrun"),
    "emulate": Setting((), "emulate", weights=False),
}

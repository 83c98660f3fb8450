"""The options of `--on slurm`, all of which are for submitting a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farandole.errors import UserError


@dataclass(frozen=True)
class SlurmOptions:
    """As given; None: not given."""

    partition: str | None = None
    time_limit: str | None = None
    account: str | None = None
    slurm_option: tuple[str, ...] = ()  # further options of sbatch, as they are
    cpus: int | None = None  # cores of each worker
    gpus: int | None = None  # of each node
    output: Path | None = None  # the file of the batch script
    dry_run: bool = False

    def __post_init__(self) -> None:
        for option in self.slurm_option:
            if not option.startswith("-"):
                raise UserError(
                    f"--slurm-option {option}: give an option of sbatch with its dashes, such as "
                    "--slurm-option=--qos=high"
                )
        for text in (*self.slurm_option, self.partition, self.time_limit, self.account):
            if text is not None and not text.isprintable():
                raise UserError(f"{text!r} cannot be an option of sbatch: it must be one line.")

    def directives(self) -> list[str]:
        """The options of sbatch that they stand for."""
        asked = {
            "--partition": self.partition,
            "--time": self.time_limit,
            "--account": self.account,
            "--cpus-per-task": self.cpus,
            "--gpus-per-node": self.gpus or None,
        }
        found = [f"{option}={value}" for option, value in asked.items() if value is not None]
        return [*found, *self.slurm_option]

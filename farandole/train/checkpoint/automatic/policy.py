"""`Checkpoints`: when a run saves by itself, where to, and what it keeps. Has a text form.

fd.Checkpoints(every="10min", keep=3, best="accuracy")      in the script, for `fd.init`
every=10min,keep=3,best=accuracy                            for `farandole run --checkpoint`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from farandole.errors import UserError
from farandole.options import format_options, parse_options
from farandole.report.target import lower_is_better
from farandole.train.checkpoint.automatic.durations import (
    read_interval,
    read_seconds,
    write_seconds,
)
from farandole.urls import is_url

AUTO: Final = "auto"
_MODES: Final = ("max", "min")


@dataclass(frozen=True)
class Checkpoints:
    """`every`: a time (`10min`), a number of steps (`500steps`), or `auto`: by Young and Daly's
    formula, from the time that saves take and the time between failures.

    `keep`: how many of the newest stay. `best`: the best by this metric stays too, such as
    `accuracy`, `loss`, or `score:max` where the name does not tell. `to`: another folder than the
    run's own, or the URL of an object store. `mtbf`: the mean time between failures, for `auto`;
    none: as recorded in the run's folder.
    """

    every: str = AUTO
    keep: int = 3
    best: str | None = None
    to: str | None = None
    mtbf: str | None = None

    def __post_init__(self) -> None:
        if self.every != AUTO:
            interval = read_interval("every", self._text("every"))
            steps = isinstance(interval, int)
            self._set("every", f"{interval}steps" if steps else write_seconds(interval))
        if self.mtbf is not None:
            self._set("mtbf", write_seconds(read_seconds("mtbf", self._text("mtbf"))))
            if self.every != AUTO:
                raise UserError(
                    f"checkpoints: mtbf={self.mtbf} is for every=auto, and every={self.every} "
                    "leaves nothing to choose. Leave out one of the two."
                )
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise UserError(f"checkpoints: keep={self.keep} must be a whole number, 1 or more.")
        if self.best is not None:
            _check_metric(self.best)
        if self.to is not None:
            _check_place(self.to)

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        if not isinstance(value, str):
            unit = "s, or steps" if name == "every" else "s"
            raise UserError(f"checkpoints: {name}={value!r} has no unit. Write '{value}{unit}'.")
        return value

    def _set(self, name: str, value: str) -> None:
        object.__setattr__(self, name, value)  # the form in which equal times are equal texts

    @property
    def every_seconds(self) -> float | None:
        """None: it counts steps, or chooses the time itself."""
        interval = None if self.every == AUTO else read_interval("every", self.every)
        return interval if isinstance(interval, float) else None

    @property
    def every_steps(self) -> int | None:
        interval = None if self.every == AUTO else read_interval("every", self.every)
        return interval if isinstance(interval, int) else None

    @property
    def mtbf_seconds(self) -> float | None:
        return None if self.mtbf is None else read_seconds("mtbf", self.mtbf)

    @property
    def metric(self) -> str | None:
        """What `best` goes by."""
        return None if self.best is None else self.best.partition(":")[0]

    @property
    def lower_is_better(self) -> bool:
        metric, _, mode = (self.best or "").partition(":")
        return mode == "min" if mode else lower_is_better(metric)

    def __str__(self) -> str:
        """The text form, as on the command line: `every=10min,keep=5`."""
        return format_options(self) or f"every={AUTO}"


def parse_checkpoints(text: str) -> Checkpoints:
    """The policy that `every=10min,keep=3,…` describes. Raises `UserError`."""
    if "=" not in text:
        raise UserError(f"checkpoints {text!r}: write every=10min, every=500steps or every=auto.")
    return parse_options(Checkpoints, text, what="checkpoints")


def _check_metric(best: str) -> None:
    metric, colon, mode = best.partition(":")
    if not metric.strip():
        raise UserError(f"checkpoints: best={best!r} names no metric, such as best=accuracy.")
    if colon and mode not in _MODES:
        raise UserError(
            f"checkpoints: best={best!r}: write {metric}:max if more is better, or {metric}:min."
        )


def _check_place(to: str) -> None:
    if not to.strip() or "," in to:
        raise UserError(f"checkpoints: to={to!r} must be a folder or a URL, without commas.")
    if is_url(to) and urlsplit(to).password is not None:
        # Command lines are visible to all users of a host, and the policy is written to logs.
        raise UserError(
            "checkpoints: the URL in to= contains a password. Leave it out, and give it to the "
            "object store's package as its documentation says: by a variable or a private file."
        )

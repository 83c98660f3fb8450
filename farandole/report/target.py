"""The target of a race: a metric, a value, and which side of the value is the good one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from farandole.errors import UserError
from farandole.report.history import History, Point

EXAMPLE = 'write --target accuracy=0.95, or, in quotes, --target "loss<=0.3"'

# Words that make a metric one to minimise; `val_loss`, `top5_err` and `train/logloss` contain them.
LOWER_WORD = re.compile(
    r"\w*loss|\w*error|\w*entropy|losses|errors|err|mse|rmse|mae|mape|wer|cer|ter|nll|perplexity|ppl"
    r"|bpc|bpd|fid|kl|divergence|deviance|residual|regret|brier|ece"
)

_FORM = re.compile(r"\s*(?P<metric>[^<>=≤≥]*?)\s*(?P<sign>>=|<=|=|≥|≤)\s*(?P<value>[^<>=≤≥]+?)\s*")


@dataclass(frozen=True)
class Target:
    """`metric` must come to at least `value`, or, when lower is better, to at most `value`."""

    metric: str
    value: float
    higher_is_better: bool

    @classmethod
    def parse(cls, text: str) -> Target:
        """`accuracy>=0.95` and `loss<=0.3` say the direction; with `=` the name tells it."""
        form = _FORM.fullmatch(text)
        if form is None or not form["metric"]:
            raise UserError(f"the target {text!r} is not METRIC=VALUE: {EXAMPLE}.")
        metric, sign = form["metric"], form["sign"]
        try:
            value = float(form["value"])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(
                f"the target {text!r} asks for {form['value']!r}, which is not a finite number: "
                f"{EXAMPLE}."
            )
        if sign == "=":
            return cls(metric, value, not lower_is_better(metric))
        return cls(metric, value, sign in (">=", "≥"))

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.higher_is_better else '≤'} {self.value:.12g}"

    def met_by(self, value: float) -> bool:
        """A value that is not finite meets no target: it is a run gone wrong."""
        if not math.isfinite(value):
            return False
        return value >= self.value if self.higher_is_better else value <= self.value

    def first_met(self, history: History) -> Point | None:
        """The first log that meets the target."""
        series = history.series(self.metric)
        return next((point for point in series if self.met_by(point.metrics[self.metric])), None)

    def reached(self, history: History) -> float | None:
        """Seconds from the start of the run to the first log that meets the target."""
        point = self.first_met(history)
        return None if point is None else point.time_seconds


def lower_is_better(metric: str) -> bool:
    """Whether the name speaks of something to minimise; anything else is taken as to maximise."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", metric).lower()
    return any(LOWER_WORD.fullmatch(word) for word in re.split(r"[\W_]+", parted))

"""`tune.html`: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from farandole.files import write_whole
from farandole.report import units
from farandole.tune.ensemble import Ensemble
from farandole.tune.options import TuneOptions
from farandole.tune.page import plots
from farandole.tune.page.facts import best_so_far, importances, rows_of
from farandole.tune.results import choices_text, command_of, counts
from farandole.tune.study import Study

NAME = "tune.html"


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("farandole.tune.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_page(
    folder: Path,
    study: Study,
    options: TuneOptions,
    facts: Mapping[str, str],
    ensemble: Ensemble | None = None,
) -> Path:
    """Raises `FarandoleError` when it cannot be written; the page before it is then still there."""
    rows, better = rows_of(study), options.higher_is_better
    ranked = study.ranked()
    spaces = study.spaces()
    columns, lines = plots.parallel(rows, spaces, options.metric, better)
    weights = importances(study)
    best = ranked[0] if ranked else None
    text = (
        _templates()
        .get_template("tune.html")
        .render(
            metric=options.metric,
            script=options.command[0],
            better="higher" if better else "lower",
            best=best,
            best_value=units.number(best.value) if best else "",
            best_choices=choices_text(best.params) if best else "",
            command=command_of(best, options) if best else "",
            counts=counts(study),
            progress=plots.progress(rows, best_so_far(rows, better), better),
            columns=columns,
            lines=lines,
            importances=weights,
            heaviest=max(weights.values(), default=1.0) or 1.0,
            names=list(spaces),
            rows=sorted(rows, key=lambda row: _order(row.value, row.is_complete, better)),
            ensemble=ensemble,
            facts=facts,
            units=units,
            size=plots,
        )
    )
    write_whole(folder / NAME, text.encode("utf-8", "replace"))
    return folder / NAME


def _order(value: float | None, complete: bool, better: bool) -> tuple[bool, bool, float]:
    """Complete trials first, and the best of them at the top."""
    return not complete, value is None, 0.0 if value is None else -value if better else value

"""HTML from the templates of the report. Every value is escaped unless it is `Markup`."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from farandole.report.plots import palette


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("farandole.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["colour"] = lambda index: palette.shade(index).name
    return made


def fill(template: str, **values: Any) -> Markup:
    return Markup(_templates().get_template(template).render(values))

"""The table of verdicts in the documentation: written from what was found, and read again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.zoo.layouts import COLUMNS, layouts_of
from tests.zoo.oracle import EXACT, REFUSED, Verdict
from tests.zoo.registry import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "exact_models.md"
NOT_RUN = "–"
BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"

FAMILIES = (
    "convolutional classifiers",
    "segmentation and detection",
    "transformers and mixers",
    "generative and adversarial",
    "series, text and video",
    "unusual forwards",
)

Found = Mapping[str, Mapping[str, Verdict]]  # model, column


def committed() -> dict[str, dict[str, str]]:
    """The verdicts on the page, by model and column."""
    found = {}
    for line in _between(PAGE.read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ZOO and len(cells) == len(COLUMNS) + 1:
            row = dict(zip(COLUMNS, cells[1:], strict=True))
            found[cells[0]] = {column: kind for column, kind in row.items() if kind != NOT_RUN}
    return found


def _between(text: str) -> str:
    return text.split(BEGIN)[1].split(END)[0]


def write(found: Found) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    made = f"{BEGIN}\n{_verdicts(found)}\n{_refusals(found)}{END}"
    PAGE.write_text(f"{before}{made}{after}")


def _verdicts(found: Found) -> str:
    kinds = [verdict.kind for row in found.values() for verdict in row.values()]
    lines = [
        f"{len(found)} architectures, {len(kinds)} pairs with a layout: {kinds.count(EXACT)} "
        f"exact, {kinds.count(REFUSED)} refused.",
    ]
    family = ""
    for name, row in sorted(found.items(), key=lambda each: FAMILIES.index(ZOO[each[0]].family)):
        if ZOO[name].family != family:
            family = ZOO[name].family
            lines += [
                "",
                f"### {family[0].upper()}{family[1:]}",
                "",
                _line("architecture", *COLUMNS),
            ]
            lines.append(_line(*["---"] * (len(COLUMNS) + 1)))
        cells = [row[column].kind if column in row else NOT_RUN for column in COLUMNS]
        lines.append(_line(name, *cells))
    return "\n".join(lines) + "\n"


def _refusals(found: Found) -> str:
    lines = [
        "## What the refusals say",
        "",
        _line("architecture", "layout", "refusal"),
        _line(*["---"] * 3),
    ]
    for name, row in found.items():
        for column, verdict in row.items():
            if verdict.kind == REFUSED:
                text = layouts_of(ZOO[name])[column]
                lines.append(_line(name, f"`{text}`", _sentence(verdict.why)))
    return "\n".join(lines) + "\n"


def _sentence(why: str) -> str:
    """Without what every run has its own of: the rank, the micro-batch."""
    why = re.sub(r"^(User|Inexact)Error: |^StageError: .*?micro-batch \d+: ", "", why)
    why = " ".join(why.split())
    return why.replace("|", "\\|")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

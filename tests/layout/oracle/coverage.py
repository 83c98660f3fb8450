"""The table in the docs of what becomes of every operator, made and checked by the tests.

`FARANDOLE_WRITE_COVERAGE=1 pytest -n 0 tests/layout/oracle` writes it anew. Otherwise what is found
must be what it says, if torch is the version that it was made with: another has other samples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.layout.oracle.verdicts import EXACT, REFUSED, WHOLE

PAGE = Path(__file__).parents[3] / "docs" / "exact_operators.md"
WAYS = ("tiles", "channels", "shares")
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|(?P<cells>.+)\|$", re.MULTILINE)
_VERSION = re.compile(r"PyTorch (\d+\.\d+)")

Cells = Mapping[str, frozenset[str]]
"""For every way: which verdicts there were."""


def cells(found: Cells) -> str:
    """A row of the table, without its name."""
    return " | ".join(_cell(found.get(way, frozenset())) for way in WAYS)


def _cell(verdicts: frozenset[str]) -> str:
    order = [word for word in (EXACT, WHOLE, REFUSED) if word in verdicts]
    return ", ".join(order) or "–"


def check(section: str, found: Mapping[str, Cells]) -> None:
    """Holds rows against the page, or writes them into it."""
    made = {name: cells(each) for name, each in found.items()}
    if os.environ.get("FARANDOLE_WRITE_COVERAGE"):
        _write(section, made)
        return
    text = PAGE.read_text()
    version = _VERSION.search(text)
    assert version is not None
    if version[1] != _minor():
        return
    known = _rows(text, section)
    wrong = {name: (row, known.get(name)) for name, row in made.items() if known.get(name) != row}
    assert not wrong, (
        f"docs/{PAGE.name} says otherwise (found, written): {wrong}. If what was found is meant, "
        "write it anew with FARANDOLE_WRITE_COVERAGE=1 pytest -n 0 tests/layout/oracle"
    )


def _minor() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def _rows(text: str, section: str) -> dict[str, str]:
    _, _, body = text.partition(f"## {section}\n")
    body = body.split("\n## ")[0]
    return {row["name"]: row["cells"].strip() for row in _ROW.finditer(body)}


def _write(section: str, made: Mapping[str, str]) -> None:
    text = PAGE.read_text()
    text = _VERSION.sub(f"PyTorch {_minor()}", text)
    head, _, body = text.partition(f"## {section}\n")
    own, separator, rest = body.partition("\n## ")
    rows = {**_rows(text, section), **made}
    words = own.split("\n|")[0].rstrip()
    table = [
        "| | " + " | ".join(WAYS) + " |",
        "|---" * (len(WAYS) + 1) + "|",
        *(f"| `{name}` | {rows[name]} |" for name in sorted(rows, key=str.lower)),
    ]
    own = f"{words}\n\n" + "\n".join(table) + "\n"
    PAGE.write_text(f"{head}## {section}\n{own}{separator}{rest}")

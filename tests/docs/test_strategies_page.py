"""The pages about strategies: every option with its true default, and every text parses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import farandole
from farandole.sync import STRATEGIES, parse

ROOT = Path(__file__).parents[2]
PAGES = {
    page.name: page.read_text()
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md")
}
NAMES = "|".join(STRATEGIES)
KINDS = "|".join(kind.__name__ for kind in STRATEGIES.values())
EVERYTHING = "\n".join(PAGES.values())
TEXTS = set(re.findall(rf"\b(?:{NAMES}):[\w=.,:/]+\b(?![=…])", EVERYTHING))
OBJECTS = set(re.findall(rf"fd\.(?:{KINDS})\(.*?\)", EVERYTHING))


def options_of(name: str) -> dict[str, str]:
    """The rows of the strategy's table: option and default."""
    page = PAGES["daso.md" if name == "daso" else "strategies.md"]
    heading = "Options" if name == "daso" else name
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(
        r"^\| option \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE
    )
    return dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", table, re.MULTILINE))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_is_there_with_its_default(name: str) -> None:
    options = options_of(name)
    assert list(options) == [field.name for field in dataclasses.fields(STRATEGIES[name])]
    for option, default in options.items():
        stated = getattr(parse(f"{name}:{option}={default}"), option)
        assert stated == getattr(STRATEGIES[name](), option), f"{name}: {option}"


def test_every_strategy_has_its_section_and_its_rows() -> None:
    page = PAGES["strategies.md"]
    sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert [section for section in sections if section in STRATEGIES] == list(STRATEGIES)
    (table,) = re.findall(
        r"^\| strategy \| what travels \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(STRATEGIES)
    assert ", ".join(f"`{name}`" for name in STRATEGIES) in PAGES["README.md"]


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_what_a_page_tells_to_type_parses(text: str) -> None:
    parse(text)


@pytest.mark.parametrize("text", sorted(OBJECTS))
def test_what_a_page_tells_to_write_can_be_built(text: str) -> None:
    strategy = eval(text, {"fd": farandole})
    assert parse(str(strategy)) == strategy


def test_there_is_much_to_check() -> None:
    assert {text.partition(":")[0] for text in TEXTS} >= {"allreduce", "local", "adacomm", "daso"}
    assert "fd.Local(every=4)" in OBJECTS

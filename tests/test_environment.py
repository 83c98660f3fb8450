"""Every variable of ours is defined in one file, once, and no other file spells its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole
from farandole import environment
from farandole.environment import VARIABLES

PACKAGE = Path(farandole.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "environment.py"]


def texts(tree: ast.Module) -> Iterator[str]:
    """Every text in a file but its docstrings, which may name a variable for the reader."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(node.value) for node in statements}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.value if isinstance(node.value, str) else ""


@pytest.mark.parametrize("path", [*FILES, PACKAGE / "worker" / "environment.py"], ids=str)
def test_no_other_file_spells_a_name(path: Path) -> None:
    spelled = [text for text in texts(ast.parse(path.read_text())) if environment.PREFIX in text]
    assert not spelled


def test_every_constant_is_described_once() -> None:
    constants = {
        value
        for name, value in vars(environment).items()
        if name.isupper() and isinstance(value, str) and name != "PREFIX"
    }
    names = [variable.name for variable in VARIABLES]
    assert sorted(names) == sorted(constants)
    assert all(variable.meaning.endswith(".") for variable in VARIABLES)


def test_docs_name_no_variable_that_does_not_exist() -> None:
    root = PACKAGE.parent
    names = {variable.name for variable in VARIABLES} | {environment.PREFIX}
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        assert set(re.findall(r"FARANDOLE_[A-Z_]*", page.read_text())) <= names, page.name

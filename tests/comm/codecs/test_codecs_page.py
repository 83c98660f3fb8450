"""The page on codecs names every codec, every option, and figures that are true."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from farandole.comm.codecs import CODECS, parse

PAGE = (Path(__file__).parents[3] / "docs" / "codecs.md").read_text()


@pytest.mark.parametrize("name", CODECS)
def test_options_and_defaults(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    options = re.findall(r"`(\w+)(?:=([\d.]+))?`", row.split("|")[2])
    stated = dict(options)
    for field in dataclasses.fields(CODECS[name]):
        assert field.name in stated
        assert field.default is True or float(stated.pop(field.name)) == field.default
    assert set(stated) <= {"feedback"}


def test_the_planner_s_example() -> None:
    codec = parse("int8:block=128")
    assert f"{codec.times_smaller((512, 4608), itemsize=4, ranks=8):.2f}" == "3.88"
    assert "ranks=8)  # against a raw all-reduce: 3.88" in PAGE
    assert not codec.compresses((512,), itemsize=4, ranks=8)

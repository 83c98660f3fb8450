"""The project around the code: what is installed is pinned, and CI runs the README's command."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pins(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line[:1].isalpha()]


PINS, FRONT_PINS = pins("constraints.txt"), pins("constraints-frontends.txt")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        asked += [name for name in extra if not name.startswith("farandole")]
    names = {normal(re.split(r"[<>=\[; ]", entry)[0]) for entry in asked}
    pinned = {normal(line.split("==")[0]) for line in PINS + FRONT_PINS if "==" in line}
    assert names <= pinned


def test_another_torch_is_refused() -> None:
    for listed in (PINS, FRONT_PINS):
        assert "torch==2.13.0" in listed
        assert {"torchvision<0", "torchaudio<0"} <= set(listed), "no version satisfies this"


def test_ci_runs_the_readmes_command() -> None:
    script = ROOT / ".ci" / "run"
    assert "make test\n" in script.read_text()
    assert "make test-frontends\n" in script.read_text()
    assert script.stat().st_mode & 0o111, "it can be executed"
    assert "make test " in (ROOT / "README.md").read_text()

"""Every command that the README tells a newcomer to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRY_IT = (ROOT / "README.md").read_text().split("## Try it")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```\n(.*?)```", TRY_IT, re.DOTALL)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line]


def run(command: list[str], cwd: Path) -> str:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_section_lists_what_these_tests_run():
    assert {shlex.split(line)[0] for line in LINES} == {"make", "farandole"}
    assert [line for line in LINES if line.startswith("make")] == ["make race", "make test"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("farandole")])
def test_farandole_command(line, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert run(shlex.split(line), tmp_path)


@pytest.mark.timeout(180)
def test_make_race(tmp_path):
    """The main job, on the environment that is already set up."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^race:.*?\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    arguments = shlex.split(command.replace("$(BIN)/", "").replace("\\\n", " "))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = run(arguments, tmp_path)
    assert "reached accuracy ≥ 0.95 first" in printed or "too close to call" in printed
    (report,) = tmp_path.glob("runs/race-*/report.html")
    assert report.stat().st_size > 10_000

"""Every command that the README tells a newcomer to type, typed."""

import json
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
# Typed, by `readme_command`, in tests that look closely at what they do.
ELSEWHERE = ("farandole bench train", "farandole bench comm", "farandole doctor")
TRAINING = ("farandole run -n 2 examples/digits.py", "farandole run -n 2 --name mine")
OTHERS = [line for line in LINES if not line.startswith(("make", *TRAINING, *ELSEWHERE))]


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """With the tests' own number of threads: more would wait for one another beside other tests."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=cwd, env=environ | variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_section_lists_what_these_tests_run():
    assert {shlex.split(line)[0] for line in LINES} == {"make", "farandole"}
    assert [line for line in LINES if line.startswith("make")] == ["make race", "make test"]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("line", OTHERS)
def test_command(line, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert run(shlex.split(line), tmp_path)


@pytest.mark.needs("sklearn")
@pytest.mark.timeout(1000)
def test_digits_learns_and_resumes(tmp_path):
    """The README's first line begins, its second goes on."""
    first, second = (line for line in LINES if line.startswith(TRAINING))
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def accuracies() -> list[float]:
        lines = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [r["metrics"]["accuracy"] for r in records if r["event"] == "log"]

    run([*shlex.split(first), "--epochs", "3"], tmp_path, FARANDOLE_NAME="mine")
    assert accuracies()[-1] > accuracies()[0] > 0.1
    run([*shlex.split(second), "--epochs", "5"], tmp_path)
    assert len(accuracies()) == 5, "the second run adds two epochs to the three"
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == 2


@pytest.mark.needs("sklearn")
@pytest.mark.timeout(1000)
def test_make_race(tmp_path):
    """The main job, on the environment that is already set up."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^race:.*?\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    arguments = shlex.split(command.replace("$(BIN)/", "").replace("\\\n", " "))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = run([*arguments, "--epochs", "1", "--channels", "8"], tmp_path)  # as it is: minutes
    assert "SIMULATED link" in printed
    (folder,) = tmp_path.glob("runs/race-*")
    assert (folder / "report.html").stat().st_size > 10_000
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["lanes"]) == 10
    assert summary["simulated"]
    assert {lane["outcome"] for lane in summary["lanes"]} <= {"ok", "stopped"}
    simulated = {lane["label"] for lane in summary["lanes"] if lane["simulated_link"]}
    assert simulated == {lane["label"] for lane in summary["lanes"]} - {"serial"}

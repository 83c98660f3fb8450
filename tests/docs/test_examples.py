"""Every example runs, on two workers, and learns something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farandole", "run", "-n", "2", "--name", "r", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )


def accuracies(tmp_path: Path) -> list[float]:
    lines = (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r["metrics"]["accuracy"] for r in records if r["event"] == "log"]


def test_every_example_is_tested():
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == {"collectives.py", "digits.py", "fashion_mnist.py"}


def test_collectives_agree(tmp_path):
    done = run(tmp_path, str(EXAMPLES / "collectives.py"))
    assert done.returncode == 0, done.stderr
    seeds = (torch.Generator().manual_seed(rank) for rank in range(2))
    samples = [torch.randn(10_000, generator=seed) for seed in seeds]
    inside = sum(int((part.abs() <= 4).sum()) for part in samples)
    outliers = [int((part.abs() > 3.5).sum()) for part in samples]
    assert f"[0] {inside} of 20000 samples lie within 4 sigma" in done.stdout
    assert f"outliers by rank: {outliers}" in done.stdout


def test_digits_learns_and_resumes(tmp_path):
    script = str(EXAMPLES / "digits.py")
    first = run(tmp_path, script, "--epochs", "3")
    assert first.returncode == 0, first.stderr
    assert accuracies(tmp_path)[-1] > accuracies(tmp_path)[0] > 0.1
    second = run(tmp_path, script, "--epochs", "5")
    assert second.returncode == 0, second.stderr
    assert len(accuracies(tmp_path)) == 5, "the second run adds two epochs to the three"


def test_fashion_mnist_learns(tmp_path):
    if not FASHION.exists() and os.environ.get("FARANDOLE_TEST_REQUIRE") != "all":
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    script = str(EXAMPLES / "fashion_mnist.py")
    done = run(tmp_path, script, "--epochs", "1", "--samples", "4000")
    assert done.returncode == 0, done.stderr
    assert accuracies(tmp_path)[-1] > 0.3


def test_fashion_mnist_says_what_is_missing(tmp_path):
    command = [sys.executable, str(EXAMPLES / "fashion_mnist.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "apt install dataset-fashion-mnist" in done.stderr

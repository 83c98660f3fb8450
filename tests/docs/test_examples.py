"""Every example runs, on two workers, and learns something."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def run(sandbox: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return sandbox.farandole("run", "-n", "2", "--name", "r", *arguments)


def records(sandbox: Any, event: str) -> list[dict[str, Any]]:
    lines = (sandbox.folder / "runs/r/metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def accuracies(sandbox: Any) -> list[float]:
    return [record["metrics"]["accuracy"] for record in records(sandbox, "log")]


def test_every_example_is_tested():
    """The digits and the race in test_readme.py: they are what the README starts with."""
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == {
        "collectives.py",
        "digits.py",
        "downpour.py",
        "fashion_mnist.py",
        "gpt.py",
        "large_array.py",
        "large_images.py",
        "lbfgs.py",
        "learn.py",
        "link_race.py",
        "matrix_factorisation.py",
        "pipeline.py",
        "sparse_logistic.py",
        "strategies.py",
        "tune.py",
    }


def test_collectives_agree(sandbox):
    done = run(sandbox, str(EXAMPLES / "collectives.py"))
    assert done.returncode == 0, done.stderr
    seeds = (torch.Generator().manual_seed(rank) for rank in range(2))
    samples = [torch.randn(10_000, generator=seed) for seed in seeds]
    inside = sum(int((part.abs() <= 4).sum()) for part in samples)
    outliers = [int((part.abs() > 3.5).sum()) for part in samples]
    assert f"[0] {inside} of 20000 samples lie within 4 sigma" in done.stdout
    assert f"outliers by rank: {outliers}" in done.stdout


@pytest.mark.needs("sklearn")
def test_strategies_meets_more_often_as_it_learns(sandbox):
    sync = ["--sync", "adacomm:start=8,steps=20"]
    done = run(sandbox, *sync, str(EXAMPLES / "strategies.py"), "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert accuracies(sandbox)[-1] > accuracies(sandbox)[0] > 0.1
    periods = [record["sync"]["period"] for record in records(sandbox, "sync")]
    assert periods[0] == 8
    assert periods[-1] < 4


@pytest.mark.needs("sklearn")
def test_strategies_crosses_hosts_and_resumes(sandbox):
    sync = ["--pretend-hosts", "2", "--sync", "daso"]
    first = run(sandbox, *sync, str(EXAMPLES / "strategies.py"), "--epochs", "3")
    assert first.returncode == 0, first.stderr
    phases = [record["sync"]["phase"] for record in records(sandbox, "sync")]
    assert list(dict.fromkeys(phases)) == ["warm-up", "cycling", "cool-down"]
    second = run(sandbox, *sync, str(EXAMPLES / "strategies.py"), "--epochs", "4")
    assert second.returncode == 0, second.stderr
    assert "going on from" in second.stdout
    assert len(accuracies(sandbox)) == 4
    assert accuracies(sandbox)[-1] > accuracies(sandbox)[0] > 0.1


@pytest.mark.needs("sklearn")
def test_pipeline_goes_on_alone(sandbox):
    script = str(EXAMPLES / "pipeline.py")
    first = run(sandbox, "--layout", "stages=2,schedule=pipedream", script, "--epochs", "1")
    assert first.returncode == 0, first.stderr
    assert "layout stages=2,schedule=pipedream,balance=" in first.stdout
    second = sandbox.fork(script, "--epochs", "3", FARANDOLE_NAME="r")
    assert second.returncode == 0, second.stderr
    assert "going on from" in second.stdout
    assert len(accuracies(sandbox)) == 3
    assert accuracies(sandbox)[-1] > 0.5 > accuracies(sandbox)[0] > 0.1


def test_gpt_with_its_own_loss_is_cut_at_its_layers(sandbox):
    sizes = ["--characters", "12000", "--width", "32", "--epochs", "2"]
    script = [str(EXAMPLES / "gpt.py"), *sizes]
    done = run(sandbox, "--layout", "stages=2,microbatches=2", *script)
    assert done.returncode == 0, done.stderr
    blocks = numbers(r"microbatches=2,balance=(\d+)\+(\d+)", done.stdout)
    assert sum(blocks) == 12  # two of each layer; words, places, the norm and the head
    first, last = (record["metrics"]["loss"] for record in records(sandbox, "log"))
    assert last < first < 4.6  # by chance: the logarithm of about 95 characters


def test_large_images_are_read_in_tiles(sandbox):
    script = [str(EXAMPLES / "large_images.py"), "--size", "255", "--images", "4"]
    done = run(sandbox, "--layout", "tiles=2x1,halo=2", *script)
    assert done.returncode == 0, done.stderr
    assert "grid: 2x1 tiles × 1 stage × 1 replica, 2 ranks" in done.stdout
    shares = re.findall(r"rank (\d) has read ([\d.]+) MiB in each pass", done.stdout)
    assert sorted(shares) == [("0", "0.124"), ("1", "0.125")]  # 127 and 128 rows of 255 bytes
    assert accuracies(sandbox)[-1] > 0.8


def test_large_images_alone_are_visited_in_turn(sandbox):
    script = [EXAMPLES / "large_images.py", "--size", "255", "--images", "4"]
    done = sandbox.fork(*script, FARANDOLE_NAME="r")
    assert done.returncode == 0, done.stderr
    assert "in_turn" in done.stdout
    assert "for 3 layers" in done.stdout  # and not twice, though each is computed twice
    assert "rank 0 has read 0.248 MiB in each pass" in done.stdout
    assert accuracies(sandbox)[-1] > 0.8


@pytest.mark.needs("sklearn")
def test_downpour_learns_from_servers(sandbox):
    sync = ["--servers", "1", "--sync", "downpour:push=2,fetch=2,warmstart=10"]
    done = run(sandbox, *sync, str(EXAMPLES / "downpour.py"), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert accuracies(sandbox)[-1] > 0.6


def test_fashion_mnist_learns(sandbox):
    if not FASHION.exists() and os.environ.get("FARANDOLE_TEST_REQUIRE") != "all":
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    script = str(EXAMPLES / "fashion_mnist.py")
    done = run(sandbox, script, "--epochs", "1", "--samples", "4000")
    assert done.returncode == 0, done.stderr
    assert accuracies(sandbox)[-1] > 0.3


def test_fashion_mnist_says_what_is_missing(sandbox):
    done = sandbox.fork(EXAMPLES / "fashion_mnist.py", "--data", sandbox.folder)
    assert done.returncode == 1
    assert "apt install dataset-fashion-mnist" in done.stderr


def numbers(pattern: str, text: str) -> list[float]:
    """What the groups of `pattern` match."""
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


@pytest.mark.needs("sklearn")
def test_sparse_logistic_finds_what_scikit_learn_finds(sandbox):
    done = sandbox.fork(EXAMPLES / "sparse_logistic.py", "--documents", "3000", "--steps", "30")
    assert done.returncode == 0, done.stderr
    (gap,) = numbers(r"gap (-?[\d.]+) %", done.stdout)
    assert -0.01 < gap < 1  # theirs is the least, but for float32
    ours, theirs, both = numbers(r"0\.01: (\d+), scikit-learn's (\d+), both (\d+)", done.stdout)
    assert both > 0.9 * theirs > 10
    assert ours < 1.5 * theirs
    (times,) = numbers(r"([\d.]+) times less", done.stdout)
    assert times > 50
    (known,) = numbers(r"servers knew: ([\d.]+) MB", done.stdout)
    assert known > 1


def test_matrix_factorisation_comes_near_the_noise(sandbox):
    sizes = ["--users", "600", "--items", "300", "--batch", "500"]
    done = sandbox.fork(EXAMPLES / "matrix_factorisation.py", *sizes)
    assert done.returncode == 0, done.stderr
    (first,) = numbers(r"epoch 0: RMSE ([\d.]+)", done.stdout)
    (last,) = numbers(r"\nRMSE ([\d.]+)", done.stdout)
    assert 0.3 < last < 0.4 < first


@pytest.mark.needs("sklearn")
def test_learn_has_the_same_bits_on_ranks_as_alone(sandbox):
    alone = sandbox.python(EXAMPLES / "learn.py")
    ranks = sandbox.farandole("run", "-n", "2", EXAMPLES / "learn.py")
    assert alone.returncode == ranks.returncode == 0, alone.stderr + ranks.stderr
    assert ranks.stdout == "".join(f"[0] {line}" for line in alone.stdout.splitlines(True))
    assert float(alone.stdout.split()[1].rstrip(",")) > 0.9
    (accuracy,) = numbers(r"tree: accuracy ([\d.]+)", alone.stdout)
    assert accuracy > 0.7
    assert "column 20: median" in alone.stdout


@pytest.mark.needs("h5py")
def test_an_array_larger_than_what_is_read_at_once(sandbox):
    done = run(sandbox, str(EXAMPLES / "large_array.py"))
    assert done.returncode == 0, done.stderr
    found = re.search(r"read (\d+) of (\d+) chunks with (\d+) at hand", done.stdout)
    assert found is not None, done.stdout
    read, there, at_hand = map(int, found.groups())
    assert there / 2 <= read <= there / 2 + 1  # one half of them, on one of two ranks
    assert at_hand < there / 4
    assert "4.0 times the memory that was allowed" in done.stdout
    losses = [record["metrics"]["loss"] for record in records(sandbox, "log")]
    assert losses[-1] < losses[0] / 2


@pytest.mark.needs("sklearn")
def test_lbfgs_finds_the_same_with_its_vectors_on_servers(sandbox):
    sizes = ("--iterations", "12", "--workers", "1")
    for more in ((), ("--servers", "1")):
        done = sandbox.python("-W", "ignore:not converged", EXAMPLES / "lbfgs.py", *sizes, *more)
        assert done.returncode == 0, done.stderr
        assert re.match(r"loss 0\.2\d+ after 12 iterations, accuracy 0\.9", done.stdout), (
            done.stdout
        )


@pytest.mark.needs("sklearn", "optuna")
def test_tune_finds_choices_and_an_ensemble(sandbox):
    words = ("--trials", "3", "--metric", "accuracy", "--ensemble", "2", "--runs", "found")
    done = sandbox.farandole("tune", *words, EXAMPLES / "tune.py", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    (best,) = numbers(r"best: trial \d, accuracy ([\d.]+) with rate", done.stdout)
    assert best > 0.2
    together, alone = numbers(r"accuracy ([\d.]+), its best member alone ([\d.]+)", done.stdout)
    (record,) = sandbox.folder.glob("found/tune-*/ensemble.json")
    ensemble = json.loads(record.read_text())
    assert ensemble["accuracy"] == pytest.approx(together, abs=1e-4)
    assert max(ensemble["alone"]) == pytest.approx(alone, abs=1e-4) == pytest.approx(best, abs=1e-3)
    assert len(ensemble["members"]) == 2

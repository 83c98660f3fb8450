"""The examples of input run, on two workers, and read what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/data"


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tested


@pytest.mark.needs("tifffile")
@pytest.mark.needs("zarr")
def test_each_worker_decodes_its_half_of_a_large_slide(sandbox: Any) -> None:
    layout = ["--layout", "tiles=2x1"]
    done = sandbox.farandole("run", "-n", "2", *layout, str(EXAMPLES / "slide.py"))
    assert done.returncode == 0, done.stderr
    found = re.search(r"rank 0 read (\d+) of (\d+) pixels", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) * 2 == int(found[2]) == 2 * 20_000**2


def test_a_folder_of_images_is_packed_and_learned(sandbox: Any) -> None:
    done = sandbox.farandole("run", "-n", "2", "--name", "r", str(EXAMPLES / "image_folder.py"))
    assert done.returncode == 0, done.stderr
    assert "2 classes: left, top" in done.stdout
    assert "240 images of 5 shards" in done.stdout
    assert logged(sandbox, "accuracy")[-1] > 0.8


def test_a_corpus_is_read_by_lines(sandbox: Any) -> None:
    done = sandbox.farandole("run", "-n", "2", "--name", "r", str(EXAMPLES / "text_corpus.py"))
    assert done.returncode == 0, done.stderr
    assert "1200 lines in" in done.stdout
    first, last = logged(sandbox, "loss")
    assert last < first < 4.9  # by chance: the logarithm of 128 characters


def logged(sandbox: Any, name: str) -> list[float]:
    lines = (sandbox.folder / "runs/r/metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [record["metrics"][name] for record in records if record["event"] == "log"]

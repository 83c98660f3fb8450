"""The examples of input run, on two workers, and read what they say."""

from __future__ import annotations

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

"""docs/models.md tells the truth: its table is recounted and its examples are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from farandole import models

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
ROW = r"^\| `(\w+)` \| ([\d,]+) \| (\d+)×(\d+)×\4 \| (\d+) \| (\d+) \|"
ROWS = {row[0]: row[1:] for row in re.findall(ROW, PAGE, flags=re.MULTILINE)}


def test_the_table_lists_every_model() -> None:
    assert tuple(ROWS) == models.NAMES


@pytest.mark.parametrize("name", models.NAMES)
def test_the_numbers_of_the_table(name: str) -> None:
    spec = models.spec(name)
    with torch.device("meta"):
        model = models.build(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = (f"{count:,}", spec.channels, spec.image_size, spec.classes, len(model))
    assert ROWS[name] == tuple(str(value) for value in expected)


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 3
    exec("\n".join(examples), {})
    assert capsys.readouterr().out.startswith("['stem', 'stage1_block1'")

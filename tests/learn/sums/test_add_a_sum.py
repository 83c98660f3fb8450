"""The page's own example of another sum."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "learn.md"


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    exec(block, {})
    found = np.array(capsys.readouterr().out.strip("[]\n").split(), dtype=float)
    assert found.shape == (3,)
    assert (found > 0.9).all()

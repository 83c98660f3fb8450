"""What the ranks of `tests/launch/scripts/train.py` have printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "launch" / "scripts" / "train.py"


def trained_ranks(output: str, size: int) -> list[dict[str, Any]]:
    """In order of rank, after checking that all have trained one model together."""
    found = [json.loads(text) for text in re.findall(r"\btrained (\{.*\})", output)]
    found.sort(key=lambda facts: facts["rank"])
    assert [facts["rank"] for facts in found] == list(range(size)), output
    for facts in found:
        assert (facts["size"], facts["weight"]) == (size, 1.0 + size)  # twice the mean of 1 … size
    return found

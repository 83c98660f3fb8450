"""Every architecture of the zoo is exact or refused under its layouts, as the documentation says.

`FARANDOLE_WRITE_TABLES=1 pytest -n 0 tests/zoo/test_zoo.py` writes the table of
docs/exact_models.md anew. Otherwise the verdicts must be those of the table, so that nothing gets
worse unnoticed.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from tests.zoo import cnns, generative, odd, segmentation, sequences, table, transformers
from tests.zoo.layouts import WITH_SAMPLE, layouts_of
from tests.zoo.oracle import EXACT, REFUSED, Verdict, verdict
from tests.zoo.registry import ZOO, Case

FAMILIES = (cnns, segmentation, transformers, generative, sequences, odd)  # each fills the zoo

REASONS = {
    "DCGAN generator": r"an image of \(1, 1\) cannot be cut into",
    "DCGAN discriminator (spectral_norm)": r"forward changes '.*_u', and a step runs it 2 times",
    "CRNN (convolutions, then an LSTM)": "cannot be traced: its control flow",
    "mixture of experts (some unused)": "cannot be traced: its control flow",
    "moving average in a buffer": r"forward changes '2.average', and a step runs it 2 times",
    "moving average in the model's own forward": "cannot be traced: its control flow",
    "temperature that changes": "its control flow|its forward changes self.temperature",
    "hook on a gradient": "cannot be traced: its control flow|register_hook is not possible",
    "branch on a size (cannot be traced)": "cannot be traced: its control flow",
}
"""Why, of the architectures that are refused under some layout. All others are exact."""
REFUSED_PAIRS = 22


def row_of(case: Case) -> dict[str, Verdict]:
    return {
        column: verdict(case, text, sample=column == WITH_SAMPLE)
        for column, text in layouts_of(case).items()
    }


@pytest.mark.parametrize("name", ZOO)
def test_exact_or_refused(name: str) -> None:
    found = row_of(ZOO[name])
    assert {c: v for c, v in found.items() if v.kind not in (EXACT, REFUSED)} == {}
    for refusal in (v.why for v in found.values() if v.kind == REFUSED):
        assert name in REASONS, refusal
        assert re.search(REASONS[name], refusal), refusal
    if "FARANDOLE_WRITE_TABLES" not in os.environ:
        why = {c: v.why for c, v in found.items()}
        assert {c: v.kind for c, v in found.items()} == table.committed()[name], why


def test_the_zoo_is_large() -> None:
    """And the page has a row for each of its models, and no other."""
    assert len(ZOO) >= 40
    kinds = Counter(kind for row in table.committed().values() for kind in row.values())
    if "FARANDOLE_WRITE_TABLES" in os.environ:
        table.write({name: row_of(case) for name, case in ZOO.items()})
    else:
        assert table.committed().keys() == ZOO.keys()
        refused = {name for name, row in table.committed().items() if REFUSED in row.values()}
        assert refused == REASONS.keys()
        assert kinds[REFUSED] == REFUSED_PAIRS

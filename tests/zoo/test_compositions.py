"""Random forwards out of what people write into models: exact or refused under any layout."""

from __future__ import annotations

import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zoo.constructs import CHANGING, CONSTRUCTS, SIDE, Net
from tests.zoo.oracle import EXACT, REFUSED, verdict
from tests.zoo.registry import LABELS, Case, numbers

LAYOUTS = (
    "tiles=2x1",
    "tiles=1x2",
    "tiles=2x2",
    "channels=2",
    "tiles=2x1,recompute",
    "stages=2,microbatches=2",
    "stages=2,recompute",
    "stages=2,microbatches=2,schedule=gems",
    "stages=2,microbatches=2,schedule=zero-bubble",
    "tiles=2x1,stages=2,microbatches=2",
)
SOME = st.lists(st.sampled_from(sorted(CONSTRUCTS)), max_size=2)


def composed(first: list[str], second: list[str]) -> Case:
    inputs = numbers(3, SIDE, SIDE)
    build, changes = lambda: Net(first, second), not CHANGING.isdisjoint(first + second)
    return Case("", "", build, inputs, LABELS, F.cross_entropy, 2, False, changes)


@settings(max_examples=25, derandomize=True)
@given(SOME, SOME, st.sampled_from(LAYOUTS), st.booleans())
def test_exact_or_refused(first: list[str], second: list[str], layout: str, sample: bool) -> None:
    found = verdict(composed(first, second), layout, sample=sample)
    assert found.kind in (EXACT, REFUSED), (found, first, second, layout)

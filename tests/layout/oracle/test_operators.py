"""Every operator of PyTorch's own database: on tiles and channels exact, whole, or refused.

Sample inputs are PyTorch's, and so are the calls that must be refused. Values, types, shapes,
gradients of all inputs and what was changed in place are those of the plain call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from tests.layout.oracle import coverage
from tests.layout.oracle.database import Case, cases, operators, wrong_cases
from tests.layout.oracle.verdicts import WHOLE, WrongError, expected, verdict
from tests.layout.oracle.ways import WAYS, Way

pytestmark = [pytest.mark.needs("expecttest"), pytest.mark.filterwarnings("ignore")]
CHUNKS = 20
# For an operator that is always computed whole, it matters little how its inputs were cut.
FEW = list({way.name: way for way in reversed(WAYS)}.values())
# The values are whatever the memory held.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty")
UNDEFINED += ("new_empty_strided",)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators(chunk: int) -> None:
    found = {}
    wrong: list[str] = []
    with torch.random.fork_rng(devices=[]):
        for name, operator in list(operators().items())[chunk::CHUNKS]:
            verdicts = defaultdict(set)
            for at, case in enumerate(chain(cases(operator), wrong_cases(operator))):
                whole = at > 1 and set().union(*verdicts.values()) == {WHOLE}
                ways = FEW if whole or case.form == "refused" else WAYS
                for way, each in _verdicts(operator, case, ways, wrong):
                    verdicts[way].add(each)
            if verdicts:
                found[name] = {way: frozenset(each) for way, each in verdicts.items()}
    assert not wrong, "\n".join(wrong)
    coverage.check("Operators", found)


def _verdicts(
    operator: Any, case: Case, ways: Sequence[Way], wrong: list[str]
) -> list[tuple[str, str]]:
    true = expected(case.call, case.given)
    refused = isinstance(true, Exception)
    found = []
    for way in ways:
        try:
            each = verdict(
                case.call,
                case.given,
                way,
                true,
                _names(operator, case),
                operator.name in UNDEFINED,
            )
        except WrongError as error:
            wrong.append(f"{case} on {way.name}: {error}"[:600])
        else:
            found += [] if refused else [(way.name, each)]
    return found


def _names(operator: Any, case: Case) -> set[str]:
    """What a refusal may call it."""
    names = {operator.name.split(".")[-1], getattr(case.call, "__name__", case.form)}
    return names | {"sum"} if operator.name.startswith("masked.") else names

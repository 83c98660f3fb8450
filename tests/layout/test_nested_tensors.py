"""The tensors in a nest of values: the same as torch's trees find, in the same order."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree

from farandole.layout.nested_tensors import tensors_of


class Pair(NamedTuple):
    one: Any
    other: Any


A, B, C = torch.zeros(1), torch.zeros(2), torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    "value",
    [
        A,
        C,
        None,
        "word",
        (),
        (A, 1, "word", (B, [C, None])),
        {"b": B, "a": (A, {"c": C})},
        [Pair(B, (A, C)), torch.float32, torch.Size([2])],
        OrderedDict(b=B, a=[A]),
        (slice(None), {"x": Pair(A, OrderedDict(y=C))}),
        (A, A),
    ],
    ids=str,
)
def test_the_tensors_are_those_of_the_tree(value: Any) -> None:
    expected = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert list(map(id, tensors_of(value))) == list(map(id, expected))

"""States that differ anywhere have different digests, and what cannot be compared is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from farandole.learn.pools.digests import digest


@dataclass
class State:
    centres: np.ndarray
    step: int


def test_equal_states_are_equal() -> None:
    states = [{"b": torch.ones(2), "a": [State(np.arange(3.0), 1), None]} for _ in range(2)]
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([0.0, 1.0]), np.array([0.0, 1.0 + 1e-15])),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (State(np.zeros(1), 1), State(np.zeros(1), 2)),
        ({"a": 1}, {"b": 1}),
        ((1, None), (None, 1)),
        (np.array(["a", 1], dtype=object), np.array(["a", 2], dtype=object)),
        (1, 1.0),
    ],
)
def test_different_states_differ(one: object, other: object) -> None:
    assert digest(one) != digest(other)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(TypeError, match="a state that holds object"):
        digest({"a": object()})

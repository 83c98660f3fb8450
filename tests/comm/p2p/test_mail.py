"""Messages by label, in the background: they arrive whole, in any order, or say why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings

from farandole.comm import Group
from farandole.comm.p2p.links import Label
from farandole.comm.p2p.mail import Mail
from farandole.comm.p2p.payload import Description, describe
from farandole.errors import CommError, UserError
from farandole.testing import run_world

T = TypeVar("T")
CPU = torch.device("cpu")
BOTH = [(0, 1), (1, 0)]


def label(number: int) -> Label:
    return (7, number, 0, 0)


def among(size: int, body: Callable[[Group], T], folder: Path) -> list[T]:
    return run_world(size, lambda run: body(run.group), folder=folder)


def test_a_value_arrives_as_it_was(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        "pair": (torch.arange(6.0).view(2, 3).t(), torch.tensor([True, False])),
        "plain": [1, True, None, 2.5, "word"],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    }

    def body(group: Group) -> Any:
        mail = Mail(group, BOTH, CPU)
        if group.rank == 0:
            mail.post(1, label(0), value)
            return None
        mail.expect(0)
        return mail.take(0, label(0))

    got = among(2, body, tmp_path)[1]
    assert got["plain"] == value["plain"]
    assert [type(item) for item in got["plain"]] == [int, bool, type(None), float, str]
    assert type(got["pair"]) is tuple
    for name in ("empty", "scalar", "half"):
        assert torch.equal(got[name], value[name])
        assert got[name].dtype == value[name].dtype
    for one, other in zip(got["pair"], value["pair"], strict=True):
        assert torch.equal(one, other)


def test_only_what_can_have_a_gradient_is_a_leaf_that_wants_one(tmp_path: Path) -> None:
    def body(group: Group) -> Any:
        mail = Mail(group, BOTH, CPU)
        if group.rank == 0:
            weight = torch.ones(3, requires_grad=True)
            for to in (0, 1):
                mail.post(to, label(to), (weight * 2, torch.ones(3)))
            return mail.take(0, label(0))
        mail.expect(0)
        return mail.take(0, label(1))

    for product, constant in among(2, body, tmp_path):
        assert product.is_leaf
        assert product.requires_grad
        assert not constant.requires_grad
        assert torch.equal(product.detach(), torch.full((3,), 2.0))


@given(order=st.permutations(range(6)), sizes=st.lists(st.integers(0, 40), min_size=6, max_size=6))
@settings(max_examples=15)
def test_any_order_of_taking(order: list[int], sizes: list[int], tmp_path_factory: Any) -> None:
    """Shapes change from message to message, and both ranks post before either takes."""

    def body(group: Group) -> bool:
        mail = Mail(group, BOTH, CPU)
        peer = 1 - group.rank
        mail.expect(peer, len(sizes))
        for number, size in enumerate(sizes):
            mail.post(peer, label(number), torch.full((size,), float(number)))
        return all(
            torch.equal(mail.take(peer, label(n)), torch.full((sizes[n],), float(n))) for n in order
        )

    assert among(2, body, tmp_path_factory.mktemp("mail")) == [True, True]


def test_a_failure_is_told_to_all_who_wait(tmp_path: Path) -> None:
    """Rank 2 fails; rank 1 hears of it and passes it on to rank 0, whom rank 2 does not know."""

    def body(group: Group) -> str:
        mail = Mail(group, [*BOTH, (1, 2), (2, 1)], CPU)
        if group.rank == 2:
            mail.fail("stage 2 is out of order")
            mail.settle(5.0)
            return "failed"
        mail.expect(group.rank + 1)
        with pytest.raises(CommError) as caught:
            mail.take(group.rank + 1, label(0))
        mail.fail(str(caught.value))
        mail.settle(5.0)
        assert mail.failure == str(caught.value)
        return str(caught.value)

    assert among(3, body, tmp_path) == ["stage 2 is out of order"] * 2 + ["failed"]


def test_a_message_that_came_before_the_failure_still_counts(tmp_path: Path) -> None:
    def body(group: Group) -> float:
        mail = Mail(group, BOTH, CPU)
        if group.rank == 0:
            mail.post(1, label(0), torch.tensor(1.0))
            mail.fail("after that, nothing")
            mail.settle(5.0)
            return 1.0
        mail.expect(0, 2)
        with pytest.raises(CommError, match="after that, nothing"):
            mail.take(0, label(1))
        return float(mail.take(0, label(0)))

    assert among(2, body, tmp_path) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "values of type object cannot travel"),
        ((1, {2}), "values of type set cannot travel"),
        (torch.ones(2).to_sparse(), "sparse_coo tensor cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_at_once(value: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        describe(value)


def test_descriptions_tell_apart_what_is_equal() -> None:
    one, true = describe(1)[0], describe(True)[0]
    assert one != true
    assert Description.read(one.text()).fill([]) == 1
    assert Description.read(true.text()).fill([]) is True
    zero, negative = describe(0.0)[0], describe(-0.0)[0]
    assert zero != negative
    assert math.copysign(1.0, Description.read(negative.text()).fill([])) == -1.0


def test_bytes_are_counted_once(tmp_path: Path) -> None:
    def body(group: Group) -> int:
        mail = Mail(group, BOTH, CPU)
        before = group.meter.bytes_sent
        mail.expect(1 - group.rank, 2)
        for number in range(2):
            mail.post(1 - group.rank, label(number), torch.zeros(100, dtype=torch.float64))
        for number in range(2):
            mail.take(1 - group.rank, label(number))
        group.barrier()
        return group.meter.bytes_sent - before

    assert among(2, body, tmp_path) == [1600, 1600]


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 3, requires_grad=True),
        torch.tensor(1.5),
        7,
        None,
        (),
        [],
        (torch.zeros(2), None, torch.tensor(1)),
        [torch.zeros(2), True, 1, "word"],
        (torch.zeros(2), (torch.zeros(3), [])),
        [torch.nn.Parameter(torch.zeros(2)), 2.5],
        {"one": torch.zeros(2)},
    ],
    ids=str,
)
def test_a_description_is_that_of_the_tree(value: Any) -> None:
    """However it was found: rows of tensors take a shorter way."""
    leaves, spec = pytree.tree_flatten(value)
    description, tensors = describe(value)
    assert description.spec == spec
    assert len(description.leaves) == len(leaves)
    assert len(tensors) == len(description.slots)
    sent = Description.read(description.text())
    assert sent == description
    assert hash(sent) == hash(description)
    filled = sent.fill(tensors)
    assert pytree.tree_structure(filled) == spec
    assert [type(leaf) for leaf in pytree.tree_leaves(filled)] == [type(leaf) for leaf in leaves]


def test_values_of_different_kinds_are_described_differently() -> None:
    row = torch.zeros(2), 1
    others = [list(row), Pair(*row), (torch.zeros(2), True), (torch.zeros(2),), torch.zeros(2)]
    others += [(torch.zeros(2, requires_grad=True), 1), (torch.zeros(2).double(), 1)]
    for other in others:
        assert describe(row)[0] != describe(other)[0]

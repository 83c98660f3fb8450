"""Tensors pass for those of before only where all that is kept of those holds for them too."""

from __future__ import annotations

import pytest
import torch

from farandole.sync.common import kinds as kinds_module
from farandole.sync.common.kinds import Kinds


@pytest.fixture(autouse=True, params=[True, False], ids=["guards", "none"])
def has_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Of `torch.compile`: a PyTorch may come that has none."""
    if not request.param:
        monkeypatch.setattr(kinds_module, "_guards", lambda tensors: None)
    return bool(request.param)


def some() -> list[torch.Tensor | None]:
    return [torch.zeros(3, 4), torch.zeros(2), torch.zeros(())]


def test_new_tensors_of_the_same_kinds_fit() -> None:
    kinds = Kinds([torch.ones(3, 4), torch.ones(2), torch.ones(())])
    assert kinds.fit(some())
    assert kinds.fit([torch.zeros(5, 4)[1:4], *some()[1:]])  # a view with the same strides


@pytest.mark.parametrize(
    "other",
    [
        None,
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(4, 3),
        torch.zeros(4, 4),
        torch.zeros(12),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(3, 4, device="meta"),
        torch.zeros(3, 4).to_sparse(),
    ],
    ids=["missing", "dtype", "shape", "rows", "dimensions", "order", "gaps", "overlaps", "device",
         "sparse"],
)  # fmt: skip
def test_one_of_another_kind_does_not(other: torch.Tensor | None) -> None:
    kinds = Kinds([torch.ones(3, 4), torch.ones(2), torch.ones(())])
    assert not kinds.fit([other, *some()[1:]])


def test_fewer_or_more_do_not() -> None:
    kinds = Kinds([torch.ones(3, 4), torch.ones(2), torch.ones(())])
    assert not kinds.fit(some()[:2])
    assert not kinds.fit([*some(), torch.zeros(1)])
    assert not kinds.fit([])


def test_a_sparse_one_does_not_pass_for_one_that_is_expanded() -> None:
    expanded = [torch.zeros(1, 1).expand(3, 4), torch.zeros(())]  # their strides are zeros, or none
    assert Kinds(expanded).fit(expanded)
    assert not Kinds(expanded).fit([torch.zeros(3, 4).to_sparse(), torch.zeros(())])
    assert not Kinds(expanded).fit([expanded[0], torch.zeros(()).to_sparse()])


def test_where_they_differ_in_nothing_that_matters() -> None:
    """Guards tell apart more than we do."""
    kinds = Kinds([torch.ones(3, 4), torch.ones(2), torch.ones(())])
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert kinds.fit(some())
            assert kinds.fit(some())
        assert kinds.fit(some())
        assert kinds.fit([torch.zeros(3, 4, requires_grad=True), *some()[1:]])
        assert not kinds.fit([torch.zeros(3, 5), *some()[1:]])
        assert not kinds.fit([None, *some()[1:]])


def test_this_pytorch_has_guards(has_guards: bool) -> None:
    assert (Kinds([torch.ones(3)])._guards is not None) is has_guards


def test_guards_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise TypeError("other arguments")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", refuses)
    kinds = Kinds([torch.ones(3)])
    assert kinds._guards is None
    assert kinds.fit([torch.zeros(3)])
    assert not kinds.fit([torch.zeros(4)])

"""The gradients of a step are all found, also where they are not what they were a step before."""

from __future__ import annotations

import torch
from torch import nn

from farandole.sync.common.device_check import DeviceChecks
from farandole.sync.common.present_gradients import PresentGradients


def parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.ones(3, 2)),
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(())),
    ]


def give(held: list[nn.Parameter]) -> None:
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)


def test_the_kinds_of_one_step_serve_the_next() -> None:
    held, present = parameters(), PresentGradients()
    give(held)
    first, on_device = present.find(held)
    assert list(first.parameters) == held
    assert not on_device.gradients
    known = []
    for _ in range(3):
        give(held)
        found, _on_device = present.find(held)
        assert all(g is p.grad for p, g in zip(held, found.gradients, strict=True))
        known.append(found.kinds)
    assert known[0] is not None
    assert known == [known[0]] * 3


def test_gradients_that_come_and_go() -> None:
    held, present = parameters(), PresentGradients()
    for missing in (None, 1, None, 0, 2, None):
        for _ in range(3):
            give(held)
            expected = list(held)
            if missing is not None:
                held[missing].grad = None
                del expected[missing]
            found, _ = present.find(held)
            assert all(map(lambda a, b: a is b, found.parameters, expected))
            assert len(found.gradients) == len(expected)


def test_other_kinds_of_gradients() -> None:
    held, present = parameters(), PresentGradients()
    for _ in range(3):
        give(held)
        present.find(held)
    for _ in range(3):
        held[0].grad = torch.ones(3, 2).to_sparse()  # its numbers are a dense tensor
        found, _ = present.find(held)
        assert found.gradients[0].layout is torch.strided
        assert found.gradients[0].sum() == 6
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for _ in range(3):
        give([wave])
        found, _ = present.find([wave])
        assert found.gradients[0].dtype is torch.float32
    empty = nn.Parameter(torch.ones(0))
    give([empty])
    assert not present.find([empty])[0].gradients


def test_a_model_whose_dtype_changes_after_the_backward_pass() -> None:
    model, present = nn.Linear(3, 2), PresentGradients()
    held = list(model.parameters())
    for _ in range(3):
        give(held)
        before, _ = present.find(held)
    model.double()  # changes the gradients that are there
    after, _ = present.find(held)
    assert {gradient.dtype for gradient in after.gradients} == {torch.float64}
    assert after.kinds is not before.kinds


def test_a_check_of_known_kinds_finds_the_same() -> None:
    held, present, checks = parameters(), PresentGradients(), DeviceChecks()
    for ill in (None, None, 2, 0, None, 1):
        give(held)
        if ill is not None:
            held[ill].grad = torch.full_like(held[ill], torch.nan)
        found, _ = present.find(held)
        check = checks.start(found.gradients, lambda f=found: f.gradients, (), found.kinds)  # type: ignore[misc]
        assert check.first_bad() == ill
        assert all(bool(p.grad.any()) is (ill is None) for p in held)  # type: ignore[union-attr]

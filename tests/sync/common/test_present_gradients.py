"""The gradients of a step are all found, also where they are not what they were a step before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.sync.common.device_check import DeviceChecks
from farandole.sync.common.kinds import Kinds
from farandole.sync.common.present_gradients import Present, PresentGradients

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, device=device)) for shape in ((3, 2), (4,), ())]


def give(held: list[nn.Parameter]) -> None:
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)


def found_on(device: str, present: PresentGradients, held: list[nn.Parameter]) -> Present:
    on_cpu, on_device = present.find(held)
    here, elsewhere = (on_cpu, on_device) if device == "cpu" else (on_device, on_cpu)
    assert not elsewhere.gradients
    return here


def test_the_kinds_of_one_step_serve_the_next() -> None:
    held, present = parameters("meta"), PresentGradients()
    give(held)
    first = found_on("meta", present, held)
    assert list(map(id, first.parameters)) == list(map(id, held))
    known = []
    for _ in range(3):
        give(held)
        found = found_on("meta", present, held)
        assert all(g is p.grad for p, g in zip(held, found.gradients, strict=True))
        known.append(found.kinds)
    assert known[0] is not None
    assert known == [known[0]] * 3


@DEVICES
def test_gradients_that_come_and_go(device: str) -> None:
    held, present = parameters(device), PresentGradients()
    for missing in (None, 1, None, 0, 2, None):
        for _ in range(3):
            give(held)
            expected = list(held)
            if missing is not None:
                held[missing].grad = None
                del expected[missing]
            found = found_on(device, present, held)
            assert list(map(id, found.parameters)) == list(map(id, expected))
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
    model, present = nn.Linear(3, 2, device="meta"), PresentGradients()
    held = list(model.parameters())
    for _ in range(3):
        give(held)
        before = found_on("meta", present, held)
    model.double()  # changes the gradients that are there
    after = found_on("meta", present, held)
    assert {gradient.dtype for gradient in after.gradients} == {torch.float64}
    assert after.kinds is not before.kinds


def test_a_check_of_known_kinds_finds_the_same() -> None:
    checks = DeviceChecks()
    kinds = Kinds([torch.ones(3, 2), torch.ones(4)])
    for ill in (None, None, 1, 0, None, 1):
        gradients = [torch.ones(3, 2), torch.ones(4)]
        if ill is not None:
            gradients[ill].fill_(torch.nan)
        check = checks.start(gradients, lambda given=gradients: given, (), kinds)  # type: ignore[misc]
        assert check.first_bad() == ill
        assert all(bool(gradient.any()) is (ill is None) for gradient in gradients)

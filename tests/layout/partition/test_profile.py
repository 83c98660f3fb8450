"""What is measured of a block, other than time; and that measuring leaves no trace."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farandole import UserError
from farandole.layout.partition.blocks import Block, blocks_of
from farandole.layout.partition.profile import parameters_only, profile_blocks

BATCH = 8
FLOAT = 4


def test_bytes_of_each_block() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Flatten())
    first, tanh, last, flatten = profile_blocks(blocks_of(model), torch.randn(BATCH, 3), repeats=1)
    assert first.parameter_bytes == (3 * 5 + 5) * FLOAT
    assert first.output_bytes == BATCH * 5 * FLOAT
    assert first.saved_bytes == BATCH * 3 * FLOAT, "a linear layer keeps its input"
    assert tanh.saved_bytes == BATCH * 5 * FLOAT, "tanh keeps its output"
    assert tanh.shared_bytes == 0
    assert last.saved_bytes == last.shared_bytes == BATCH * 5 * FLOAT, "which is the next input"
    assert flatten[3:] == (BATCH * 2 * FLOAT, 0, 0, 0)
    assert min(first.forward_seconds, first.backward_seconds, last.backward_seconds) > 0
    assert json.loads(json.dumps(first._asdict()))["name"] == "0"


def test_a_tensor_that_is_saved_twice_counts_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x + x[:1] * x[:2]

    (profile,) = profile_blocks(
        blocks_of([nn.Linear(4, 4), Twice()])[1:], torch.randn(2, 4, requires_grad=True)
    )
    assert profile.saved_bytes == 2 * 4 * FLOAT


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.argmax(1)


class Unpair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.one_hot(pair[1], 4)


def test_what_has_no_gradient() -> None:
    blocks = blocks_of([nn.Linear(4, 4), Pair(), Unpair(), Pair()])
    profiles = profile_blocks(blocks, torch.randn(2, 4))
    assert profiles[1].output_bytes == 2 * 4 * FLOAT + 2 * 8
    assert profiles[2].saved_bytes == 0
    frozen = nn.Linear(4, 4).requires_grad_(False)
    (profile,) = profile_blocks(blocks_of([frozen]), torch.randn(2, 4))
    assert profile.saved_bytes == 0


def test_the_loss_is_part_of_the_last_block() -> None:
    target = torch.randint(2, (BATCH,))
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return F.cross_entropy(output, target)

    blocks = blocks_of([nn.Linear(3, 2), nn.Linear(2, 2)])
    plain, with_loss = (
        profile_blocks(blocks, torch.randn(BATCH, 3), loss=each) for each in (None, loss)
    )
    assert set(seen) == {(BATCH, 2)}
    assert with_loss[0].saved_bytes == plain[0].saved_bytes
    assert with_loss[1].saved_bytes > plain[1].saved_bytes


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[2].eval()
    x = torch.randn(BATCH, 3)
    model(x).sum().backward()
    model[3].weight.grad = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [weight.grad for weight in model.parameters()]
    values = [None if each is None else each.clone() for each in gradients]

    draw = nn.Dropout(0.5)
    drawn: list[Any] = []
    for measured in (False, True):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if measured:
            with torch.no_grad():
                profiles = profile_blocks([*blocks_of(model), Block("draw", draw)], x)
            assert profiles[0].saved_bytes > 0
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert [layer.training for layer in model] == [True, True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for weight, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert weight.grad is gradient
        assert gradient is None or torch.equal(gradient, value)


def test_without_a_sample_parameters_are_the_measure() -> None:
    profiles = parameters_only(blocks_of([nn.Linear(3, 5), nn.Tanh(), nn.Linear(9, 19)]))
    seconds = [each.forward_seconds + each.backward_seconds for each in profiles]
    assert seconds[1] == 0
    assert seconds[2] / seconds[0] == pytest.approx((9 * 19 + 19) / (3 * 5 + 5))
    assert profiles[0].parameter_bytes == (3 * 5 + 5) * FLOAT


def test_a_block_that_fails_is_named_and_the_model_still_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(5, 1))
    before = model[0].running_mean.clone()
    with pytest.raises(UserError, match=r"Block 2 \(2\) fails .*\(8, 4\) float32.*shapes"):
        profile_blocks(blocks_of(model), torch.randn(BATCH, 3))
    assert torch.equal(model[0].running_mean, before)
    assert model[1].weight.grad is None
    with pytest.raises(UserError, match="repeats=0"):
        profile_blocks(blocks_of(model), torch.randn(BATCH, 3), repeats=0)

"""The check of masked means: what it looks at, and when it says what it has found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farandole.errors import UserError
from farandole.layout.pipeline.masked_means import MaskedMeans

SAMPLES = 4


def targets(ignored: int) -> Tensor:
    return torch.tensor([-100] * ignored + [1] * (SAMPLES - ignored))


def mean(ignored: int, weight: Tensor | None = None) -> Tensor:
    return F.cross_entropy(torch.zeros(SAMPLES, 3), targets(ignored), weight=weight)


def forward(
    means: MaskedMeans, step: int, micro: int, *, layers: int | None = None, loss: int | None = None
) -> None:
    """A forward pass with a mean in its layers, in its loss, in both or in none."""
    with means.of(step, micro, SAMPLES) as watch:
        if layers is not None:
            mean(layers)

        def function(output: Tensor, target: Tensor) -> Tensor:
            return torch.zeros(()) if loss is None else mean(loss)

        last = function if watch is None else watch.around(function)
        last(torch.zeros(1), torch.zeros(1))
    last(torch.zeros(1), torch.zeros(1))  # computed again: it does not count twice


def test_means_of_the_layers_are_compared() -> None:
    means = MaskedMeans()
    forward(means, 0, 0, layers=0, loss=0)
    forward(means, 0, 1, layers=1, loss=0)
    with pytest.raises(UserError, match=r"4 in the 4 samples of micro-batch 0 and 3 in"):
        means.check()


def test_means_of_the_loss_are_compared() -> None:
    means = MaskedMeans()
    forward(means, 0, 0, loss=2)
    forward(means, 0, 1, loss=2)
    forward(means, 0, 2, loss=1)
    with pytest.raises(UserError, match=r"2 in the 4 samples of .* and 3 in .* micro-batch 2"):
        means.check()


def test_steps_are_compared_each_for_itself() -> None:
    means = MaskedMeans()
    forward(means, 0, 0, loss=0)
    forward(means, 0, 1, loss=0)
    forward(means, 1, 0, loss=1)  # a stream begins a batch before the last one is done
    means.check()
    forward(means, 1, 1, loss=1)
    means.check()
    assert means.first_of(0) is None
    assert means.first_of(1) == (0, SAMPLES, [3.0])
    forward(means, 2, 0)
    forward(means, 3, 0, loss=0)  # what an earlier step had no mean of
    forward(means, 3, 1, loss=1)
    with pytest.raises(UserError):
        means.check()


def test_weights_of_classes_count() -> None:
    means = MaskedMeans()
    weight = torch.tensor([1.0, 0.25, 1.0])
    with means.of(0, 0, SAMPLES) as watch:
        mean(1, weight)
    assert watch is not None
    means.check()
    assert means.first_of(0) == (0, SAMPLES, [0.75])


def test_nothing_is_watched_where_the_first_has_no_mean() -> None:
    means = MaskedMeans()
    forward(means, 0, 0)
    with means.of(0, 1, SAMPLES) as watch:
        assert watch is None
        assert not isinstance(torch.overrides._get_current_function_mode(), TorchFunctionMode)
    means.check()

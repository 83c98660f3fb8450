"""AmoebaNet-D (Real et al. 2019), the model pipelines are measured on since GPipe.

A cell has two inputs: the output of the cell before it and that of the one before that. So a pair
travels from block to block, and every block but the first and the last maps a pair to a pair:

    stem  image ──► (y, y)
    cell  (now, before) ──► (next, now)
    head  (now, before) ──► logits

Inside a cell five sums are formed. Each adds two operations on states that exist already: 0 is the
current input, 1 the one before, 2 to 6 the sums in order. In the end some states are joined along
the channels. Which ones the normal cell joins differs between the paper and Google's code; GPipe's
parameter counts come out with the code's choice, which is the one below.

`layers` is the number of normal cells, `filters` the width of the first third of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farandole.errors import UserError
from farandole.models.pieces import (
    Side,
    check_request,
    conv,
    initialise_he,
    pooled_head,
    sequence,
)

Pair = tuple[Tensor, Tensor]
# An operation is built from (channels, stride).
Operation = Callable[[int, int], nn.Module]


def amoebanet_d(
    *,
    classes: int = 1000,
    image_size: int = 224,
    channels: int = 3,
    layers: int = 18,
    filters: int = 208,
) -> nn.Sequential:
    """AmoebaNet-D (`layers`, `filters`); 81.5 million parameters with the defaults."""
    check_request(
        "amoebanet_d", classes=classes, channels=channels, image_size=image_size, smallest_image=16
    )
    if layers < 3 or layers % 3:
        raise UserError(
            f"amoebanet_d: layers={layers}; the normal cells come in three equal groups, give a "
            f"multiple of 3 such as {max(3, layers - layers % 3)}."
        )
    if filters < 8 or filters % 8:
        raise UserError(
            f"amoebanet_d: filters={filters}; widths are halved down to an eighth, give a "
            f"multiple of 8 such as {max(8, filters - filters % 8)}."
        )

    width = filters // 4
    blocks: list[tuple[str, nn.Module]] = [("stem", Stem(channels, width))]
    now = before = width
    before_is_larger = False

    def add_cell(name: str, plan: CellPlan) -> None:
        nonlocal now, before, before_is_larger
        blocks.append((name, Cell(plan, now, before, width, before_is_larger=before_is_larger)))
        now, before = width * len(plan.joined), now
        before_is_larger = plan.stride > 1

    for index in (1, 2):
        width *= 2
        add_cell(f"stem_reduction{index}", REDUCTION)
    for group in (1, 2, 3):
        if group > 1:
            width *= 2
            add_cell(f"reduction{group - 1}", REDUCTION)
        for index in range(1, layers // 3 + 1):
            add_cell(f"normal{group}_{index}", NORMAL)
    blocks.append(("head", Head(now, classes)))

    model = sequence(blocks)
    initialise_he(model)
    return model


class Stem(nn.Module):
    """Halves the image and makes the first pair of it."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = conv(channels, width, 3, stride=2)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: Tensor) -> Pair:
        y = self.norm(self.conv(image))
        return y, y


class Cell(nn.Module):
    """Brings both inputs to the same shape, forms the five sums, joins the unconsumed states."""

    def __init__(
        self,
        plan: CellPlan,
        channels_now: int,
        channels_before: int,
        width: int,
        *,
        before_is_larger: bool,
    ) -> None:
        super().__init__()
        self.joined = plan.joined
        self.enter_now = _relu_conv_norm(channels_now, width, 1)
        self.enter_before: nn.Module = nn.Identity()
        if before_is_larger:
            self.enter_before = FactorizedReduction(channels_before, width)
        elif channels_before != width:
            self.enter_before = _relu_conv_norm(channels_before, width, 1)
        self.sums = nn.ModuleList(Sum(left, right, width, plan.stride) for left, right in plan.sums)

    def forward(self, pair: Pair) -> Pair:
        now, before = pair
        states = [self.enter_now(now), self.enter_before(before)]
        for add in self.sums:
            states.append(add(states))
        return torch.cat([states[index] for index in self.joined], dim=1), now


class Sum(nn.Module):
    """Two operations, each on a state of the cell, added."""

    def __init__(self, left: Term, right: Term, width: int, stride: int) -> None:
        super().__init__()
        self.states = (left.state, right.state)
        # Only the two inputs of the cell are still at the old resolution.
        self.left = left.operation(width, stride if left.state < 2 else 1)
        self.right = right.operation(width, stride if right.state < 2 else 1)

    def forward(self, states: list[Tensor]) -> Tensor:
        left, right = self.states
        return self.left(states[left]) + self.right(states[right])  # type: ignore[no-any-return]


class FactorizedReduction(nn.Module):
    """Halves the image with two strided 1×1 convolutions, one shifted by a pixel.

    Between them they look at half of the pixels where one would see a quarter.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.even = conv(channels_in, channels_out // 2, 1, stride=2)
        self.odd = conv(channels_in, channels_out // 2, 1, stride=2)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Classifies the newer half of the pair."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classify = pooled_head(channels, classes)

    def forward(self, pair: Pair) -> Tensor:
        now, _ = pair
        return self.classify(F.relu(now))  # type: ignore[no-any-return]


def _relu_conv_norm(
    channels_in: int, channels_out: int, kernel: Side, stride: Side = 1
) -> nn.Sequential:
    # Not in place: the state that enters is read by other operations too.
    return sequence(
        [
            ("relu", nn.ReLU()),
            ("conv", conv(channels_in, channels_out, kernel, stride=stride)),
            ("norm", nn.BatchNorm2d(channels_out)),
        ]
    )


def _nothing(channels: int, stride: int) -> nn.Module:
    assert stride == 1
    return nn.Identity()


def _max_pool_2x2(channels: int, stride: int) -> nn.Module:
    # Rounded up like the padded 3×3 operations it is added to, so odd image sizes work.
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def _max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _mean_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _relu_conv_norm(channels, channels, 1, stride)


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, narrow, 1),
        _relu_conv_norm(narrow, narrow, 3, stride),
        _relu_conv_norm(narrow, channels, 1),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, narrow, 1),
        _relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        _relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        _relu_conv_norm(narrow, channels, 1),
    )


class Term(NamedTuple):
    """One operation on one state."""

    operation: Operation
    state: int


class CellPlan(NamedTuple):
    """What a kind of cell consists of: its sums in order, and the states it joins at the end."""

    stride: int
    sums: tuple[tuple[Term, Term], ...]
    joined: tuple[int, ...]


NORMAL = CellPlan(
    stride=1,
    sums=(
        (Term(_conv_1x1, 1), Term(_max_pool_3x3, 1)),
        (Term(_nothing, 1), Term(_conv_1x7_7x1, 0)),
        (Term(_conv_1x1, 0), Term(_conv_1x7_7x1, 0)),
        (Term(_max_pool_3x3, 2), Term(_nothing, 2)),
        (Term(_mean_pool_3x3, 1), Term(_conv_1x1, 5)),
    ),
    joined=(0, 3, 4, 6),
)
REDUCTION = CellPlan(
    stride=2,
    sums=(
        (Term(_max_pool_2x2, 0), Term(_max_pool_3x3, 0)),
        (Term(_nothing, 2), Term(_conv_3x3, 1)),
        (Term(_conv_1x7_7x1, 2), Term(_max_pool_3x3, 2)),
        (Term(_nothing, 3), Term(_max_pool_2x2, 1)),
        (Term(_mean_pool_3x3, 2), Term(_conv_1x1, 3)),
    ),
    joined=(4, 5, 6),
)

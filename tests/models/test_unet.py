"""The U-Net scores every pixel of an image of any size, and joins each level with its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole import models


# Even at every level, odd at every level, and not square.
@pytest.mark.parametrize(("height", "width"), [(16, 16), (15, 15), (23, 8), (9, 31)])
def test_the_scores_have_the_size_of_the_image(height: int, width: int) -> None:
    model = models.unet(classes=3, image_size=8, width=2, depth=3)
    assert model(torch.randn(2, 1, height, width)).shape == (2, 3, height, width)


def test_levels_halve_the_image_and_double_the_channels() -> None:
    model = models.unet(image_size=13, width=4, depth=3)
    levels = model[:4](torch.randn(2, 1, 13, 13))
    assert [level.shape[1:] for level in levels] == [(4, 13, 13), (8, 6, 6), (16, 3, 3), (32, 1, 1)]
    levels = model[4:6](levels)
    assert [level.shape[1:] for level in levels] == [(4, 13, 13), (8, 6, 6)]
    assert model[6](levels).shape[1:] == (4, 13, 13)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_level_has_a_way_around_those_below(level: int) -> None:
    model = models.unet(image_size=12, width=2, depth=3).eval()
    image = torch.randn(1, 1, 12, 12, requires_grad=True)
    below = model.get_submodule(f"up{level}.enlarge")
    for weight in below.parameters():  # nothing comes from below any more
        nn.init.zeros_(weight)
    enlarged: list[torch.Tensor] = []
    below.register_forward_hook(lambda module, args, output: enlarged.append(output))
    model(image).sum().backward()
    assert not enlarged[0].any()
    assert image.grad is not None
    assert image.grad.any()


def test_an_odd_row_gets_its_scores_from_the_level_itself() -> None:
    model = models.unet(image_size=5, width=2, depth=1).eval()
    levels = model[:2](torch.randn(1, 1, 5, 5))
    up = model.get_submodule("up1")
    enlarged = up.enlarge(levels[1], output_size=(5, 5))
    assert torch.equal(enlarged[..., :4, :4], up.enlarge(levels[1]))
    expected = up.enlarge.bias.reshape(-1, 1).expand(-1, 5)
    assert torch.equal(enlarged[0, :, 4], expected)
    assert torch.equal(enlarged[0, :, :, 4], expected)

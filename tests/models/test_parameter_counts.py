"""Parameter and operation counts against the literature: the cheapest proof of an architecture.

Parameters fix channels and kernels; multiplications at the native size fix strides and padding.
Models are built on the meta device, where neither memory nor arithmetic is spent.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from farandole import models
from farandole.models.googlenet import MODULES


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name: str, **options: object) -> nn.Sequential:
    with torch.device("meta"):
        return models.build(name, **options)


# Parameters. alexnet, googlenet, inception_v3, resnet18, resnet50, vgg16: `num_params` beside
# torchvision's published weights (pytorch/vision, torchvision/models/*.py). torchvision gives
# GoogLeNet's count without auxiliary heads and Inception v3's with its head; 23,834,568 without is
# in the self-tests of osmr/imgclsmob. alexnet_towers: Caffe's bvlc_alexnet, weights and biases.
# resnet110_v2: 1.7M in He et al. 2016a and 2016b; 1,727,962 is what reimplementations with
# parameter-free shortcuts report (1,730,522 with projections: 16·32 + 32·64 more).
#
# Multiplications in billions. `_ops` beside torchvision's weights; alexnet_towers: 0.724 for
# Caffe's bvlc_alexnet; resnet110_v2: 0.25 for ResNet-110 on CIFAR.
@pytest.mark.parametrize(
    ("name", "expected", "billions", "digits"),
    [
        ("alexnet", 61_100_840, 0.714, 3),
        ("alexnet_towers", 60_965_224, 0.724, 3),
        ("googlenet", 6_624_904, 1.498, 3),
        ("inception_v3", 23_834_568, 5.713, 3),
        ("resnet18", 11_689_512, 1.814, 3),
        ("resnet50", 25_557_032, 4.089, 3),
        ("resnet110_v2", 1_727_962, 0.25, 2),
        ("vgg16", 138_357_544, 15.47, 2),
    ],
)
def test_a_model_is_that_of_the_literature(
    name: str, expected: int, billions: float, digits: int
) -> None:
    spec = models.spec(name)
    model = on_meta(name).eval()
    assert parameters(model) == expected
    image = torch.empty(1, spec.channels, spec.image_size, spec.image_size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = model(image)
    assert logits.shape == (1, spec.classes)
    # The counter counts a multiplication and its addition as two.
    assert round(counter.get_total_flops() / 2e9, digits) == billions


# With auxiliary heads: `num_params` of torchvision for Inception v3, widely quoted for GoogLeNet.
# resnet18 at 32×32 with 10 classes: 11,173,962 in the usual CIFAR reimplementations.
# vgg16 with BatchNorm: torchvision's vgg16_bn.
# unet: for colour images with one class and with two, what reimplementations report with padding,
# BatchNorm and convolutions without bias.
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("googlenet", {"auxiliary": True}, 13_004_888),
        ("inception_v3", {"auxiliary": True}, 27_161_264),
        ("resnet18", {"image_size": 32, "classes": 10}, 11_173_962),
        ("vgg16", {"batch_norm": True}, 138_365_992),
        ("unet", {"channels": 3, "classes": 1}, 31_037_633),
        ("unet", {"channels": 3}, 31_037_698),
    ],
)
def test_so_is_a_variant(name: str, options: dict[str, object], expected: int) -> None:
    assert parameters(on_meta(name, **options)) == expected


# kakaobrain/torchgpipe, benchmarks/amoebanetd-memory/README.md (1000 classes): its own counts as
# printed there, in millions with one digit, and those of table 1 of the GPipe paper (Huang et al.
# 2019), which it quotes: 82M, 318M, 542M. Blocks: `balance` in main.py beside it.
@pytest.mark.parametrize(
    ("layers", "filters", "millions", "gpipe_millions", "blocks"),
    [
        (18, 208, 81.5, 82, 24),
        (18, 416, 319.0, 318, 24),
        (18, 544, 542.7, 542, 24),
    ],
)
def test_amoebanet_d_grows_as_in_the_pipeline_papers(
    layers: int, filters: int, millions: float, gpipe_millions: int, blocks: int
) -> None:
    model = on_meta("amoebanet_d", layers=layers, filters=filters)
    count = parameters(model) / 1e6
    assert round(count, 1) == millions
    assert count == pytest.approx(gpipe_millions, rel=0.03)
    assert len(model) == blocks
    if (layers, filters) == (18, 208):  # the default
        with torch.no_grad():
            assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)


def test_the_papers_five_by_five_branch_costs_what_its_table_says() -> None:
    more = sum(reduced * five * (25 - 9) for _, (_, _, _, reduced, five, _) in MODULES)
    usual, paper = on_meta("googlenet"), on_meta("googlenet", wide_kernel=5)
    assert parameters(paper) - parameters(usual) == more


@pytest.mark.parametrize(
    ("image_size", "channels", "expected"),
    [
        # 16·9·c + 16, 32·16·9 + 32, (32·(s/4)²)·64 + 64, 64·10 + 10
        (8, 1, 160 + 4_640 + 8_256 + 650),
        (28, 1, 160 + 4_640 + 100_416 + 650),
        (32, 3, 448 + 4_640 + 131_136 + 650),
    ],
)
def test_small_cnn_by_hand(image_size: int, channels: int, expected: int) -> None:
    model = models.small_cnn(image_size=image_size, channels=channels)
    assert parameters(model) == expected


def test_mlp_by_hand() -> None:
    model = models.mlp(image_size=8, hidden=(32, 16))
    assert parameters(model) == (64 * 32 + 32) + (32 * 16 + 16) + (16 * 10 + 10)
    assert parameters(models.mlp(image_size=8, hidden=())) == 64 * 10 + 10

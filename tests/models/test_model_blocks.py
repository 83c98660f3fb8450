"""A model is its blocks in order, and may be cut between any two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from farandole import models

# Small enough for a CPU in a test. Where the last grid is a single pixel, BatchNorm still has the
# three images of the batch to average over.
SMALL = {
    "alexnet": {"image_size": 63},
    "alexnet_towers": {"image_size": 67},
    "googlenet": {"image_size": 31, "auxiliary": True},
    "inception_v3": {"image_size": 75},
    "resnet18": {"image_size": 8},
    "resnet50": {"image_size": 8},
    "resnet110_v2": {"image_size": 8},
    "vgg16": {"image_size": 32},
    "amoebanet_d": {"image_size": 32, "layers": 3, "filters": 16},
    "unet": {"image_size": 13, "width": 4, "depth": 3},
    "small_cnn": {"image_size": 8},
    "mlp": {"image_size": 8},
}
Travelling = Tensor | tuple[Tensor, ...]
BATCH = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Tensors this small gain nothing from threads, and the tests run side by side.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def small(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return models.build(name, classes=5, **SMALL[name])


@cache
def images(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    side = SMALL[name]["image_size"]
    return torch.randn(BATCH, models.spec(name).channels, side, side, generator=generator)


def places(name: str) -> tuple[int, ...]:
    """Where there are scores for each image: once, or for every pixel."""
    side = SMALL[name]["image_size"]
    return (side, side) if name == "unet" else ()


def labels(name: str) -> Tensor:
    return torch.arange(BATCH).reshape(-1, *(1 for _ in places(name))).expand(-1, *places(name))


def tensors(travelling: Travelling) -> tuple[Tensor, ...]:
    return (travelling,) if isinstance(travelling, Tensor) else travelling


def test_every_model_is_tested() -> None:
    assert tuple(SMALL) == models.NAMES


@pytest.mark.parametrize("name", models.NAMES)
def test_the_blocks_in_order_are_the_model(name: str) -> None:
    model = small(name).eval()
    assert type(model) is nn.Sequential, "a subclass could do more than run its blocks"
    with torch.no_grad():
        travelling = images(name)
        for position, block in enumerate(model):
            # A pipeline keeps what a stage received, so a block must leave it as it was.
            versions = [tensor._version for tensor in tensors(travelling)]
            after = block(travelling)
            assert [tensor._version for tensor in tensors(travelling)] == versions, position
            travelling = after
        assert travelling.shape == (BATCH, 5, *places(name))
        assert torch.equal(travelling, model(images(name)))


def gradients(model: nn.Sequential) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert None not in found.values()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def train_whole(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)  # dropout
    models.with_auxiliary(F.cross_entropy)(model(x), y).backward()
    return gradients(model)


@pytest.mark.parametrize("name", models.NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = small(name).train()
    for parameter, gradient in train_whole(model, images(name), labels(name)).items():
        assert 0 < gradient.abs().sum() < math.inf, parameter


# The light ones, among them everything that is special: pairs, auxiliary logits, levels, residuals.
LIGHT = ("googlenet", "resnet110_v2", "amoebanet_d", "unet", "small_cnn", "mlp")


@settings(max_examples=6, deadline=None)
@given(name=st.sampled_from(LIGHT), where=st.floats(0, 1))
def test_cut_anywhere_two_stages_compute_the_same(name: str, where: float) -> None:
    model = small(name).train()
    cut = 1 + round(where * (len(model) - 2))
    first, second = model[:cut], model[cut:]
    assert len(first)
    assert len(second)
    x, y = images(name), labels(name)
    whole = train_whole(model, x, y)

    # As in a pipeline: the second stage sees only values, and sends back only gradients.
    torch.manual_seed(2)
    sent = tensors(first(x))
    received = tuple(tensor.detach().requires_grad_() for tensor in sent)
    outputs = second(received if len(received) > 1 else received[0])
    models.with_auxiliary(F.cross_entropy)(outputs, y).backward()
    used = [(s, r.grad) for s, r in zip(sent, received, strict=True) if r.grad is not None]
    torch.autograd.backward([s for s, _ in used], [gradient for _, gradient in used])
    severed = gradients(model)

    assert severed.keys() == whole.keys()
    for parameter, gradient in whole.items():
        torch.testing.assert_close(severed[parameter], gradient, msg=f"{name}, {cut}, {parameter}")


# AmoebaNet's small variant has no convolution large enough to measure.
@pytest.mark.parametrize("name", ["resnet18", "resnet110_v2", "vgg16"])
def test_convolutions_start_as_he_et_al_say(name: str) -> None:
    convolutions = [module for module in small(name).modules() if isinstance(module, nn.Conv2d)]
    large = [module for module in convolutions if module.weight.numel() > 5000]
    assert large
    for module in large:
        height, width = module.kernel_size
        std = math.sqrt(2 / (module.out_channels * height * width))
        assert module.weight.std().item() == pytest.approx(std, rel=0.05)


def test_stages_keep_the_parameter_names_of_the_whole() -> None:
    model = small("resnet18")
    first, second = model[:4], model[4:]
    assert {**first.state_dict(), **second.state_dict()}.keys() == model.state_dict().keys()


@pytest.mark.parametrize(("name", "heads"), [("googlenet", 2), ("inception_v3", 1)])
def test_auxiliary_logits_ride_along_in_training_only(name: str, heads: int) -> None:
    spec = models.spec(name)
    with torch.no_grad(), torch.device("meta"):
        model = models.build(name, classes=7, auxiliary=True)
        image = torch.empty(2, 3, spec.image_size, spec.image_size)
        trained = model.train()(image)
        evaluated = model.eval()(image)
    assert [logits.shape for logits in trained] == [(2, 7)] * (1 + heads)
    assert evaluated.shape == (2, 7)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_only_add_parameters(name: str) -> None:
    with torch.device("meta"):
        without = models.build(name).state_dict()
        with_heads = models.build(name, auxiliary=True).state_dict()
    added = with_heads.keys() - without.keys()
    assert without.keys() <= with_heads.keys()
    assert added
    assert all(key.startswith("auxiliary") for key in added)


def test_with_auxiliary_weighs_the_extra_losses() -> None:
    main, extra, target = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 2])
    loss = models.with_auxiliary(F.cross_entropy, weight=0.25)
    assert torch.equal(loss(main, target), F.cross_entropy(main, target))
    expected = F.cross_entropy(main, target) + 0.5 * F.cross_entropy(extra, target)
    torch.testing.assert_close(loss((main, extra, extra), target), expected)

"""A model that is no sequence is traced; its blocks in order are still the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farandole import UserError, models
from farandole.layout.partition.blocks import Block, blocks_of


def in_order(blocks: list[Block], value: Any) -> Any:
    for block in blocks:
        value = block.module(value)
    return value


def outcome(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(3)  # for dropout
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def assert_same(model: nn.Module, blocks: list[Block], x: Tensor) -> None:
    expected = outcome(model, model, x)
    found = outcome(model, lambda x: in_order(blocks, x), x)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(x + self.second(y), inplace=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True))
        self.body = nn.Sequential(Residual(4), Residual(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        x = self.body(self.stem(x.flatten(1)))
        if scale is not None:
            x = x * scale
        return self.head(F.dropout(x, 0.5, self.training))


class UNet(nn.Module):
    """Two skips, one within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
        self.bottom = nn.Conv2d(4, 4, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        y = F.interpolate(self.bottom(F.max_pool2d(two, 2)), size=two.shape[2:])
        y = F.interpolate(self.up2(torch.cat([y, two], 1)), size=one.shape[2:])
        return self.up1(torch.cat([y, one], 1))


class Language(nn.Module):
    """Tied weights, a parameter and a buffer of its own, positions made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.gain = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.size(1), device=x.device))
        for layer in self.layers:
            y = torch.tanh(layer(y)) * self.gain + self.shift
        return F.linear(y, self.words.weight)


def test_residual_blocks_stay_whole() -> None:
    model = Net()
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["stem.0", "body.0.first", "body.1.first", "head"]
    assert_same(model, blocks, torch.randn(5, 2, 3))


def test_parameters_keep_their_names_and_are_the_model_s_own() -> None:
    model = Net()
    tensors = model.state_dict(keep_vars=True)
    held = [block.module.state_dict(keep_vars=True) for block in blocks_of(model)]
    assert [name for part in held for name in part] == list(tensors)
    assert all(tensor is tensors[name] for part in held for name, tensor in part.items())


@pytest.mark.parametrize("recorded_in_training", [True, False])
def test_the_mode_of_a_block_decides_not_that_of_the_recording(recorded_in_training: bool) -> None:
    model = Net().train(recorded_in_training)
    blocks = blocks_of(model)
    assert all(block.module.training is recorded_in_training for block in blocks)
    x = torch.randn(5, 6)
    for mode in (True, False, True):
        model.train(mode)
        for block in blocks:
            block.module.train(mode)
        assert_same(model, blocks, x)
        torch.manual_seed(0)
        once = in_order(blocks, x)
        assert torch.equal(once, in_order(blocks, x)) is not mode


def test_skips_travel_along() -> None:
    model = UNet()
    blocks = blocks_of(model, cuts=("down2", "bottom", "up2", "up1"))
    assert [block.name for block in blocks] == ["down1", "down2", "bottom", "up2", "up1"]
    x = torch.randn(2, 1, 8, 8)
    assert_same(model, blocks, x)
    travels, value = [], x
    for block in blocks:
        value = block.module(value)
        travels.append(len(value) if isinstance(value, tuple) else 1)
    assert travels == [2, 3, 2, 1, 1]
    whole = blocks_of(model)
    assert [block.name for block in whole] == ["down1", "down2", "up1"]
    assert_same(model, whole, x)


def test_tied_weights_and_tensors_of_the_model_itself() -> None:
    model = Language()
    blocks = blocks_of(model)
    names = ["words", "layers.0", "mul", "layers.1", "mul_1", "linear"]
    assert [block.name for block in blocks] == names
    assert_same(model, blocks, torch.tensor([[1, 2, 3], [4, 5, 8]]))
    assert_same(model, blocks, torch.tensor([[7, 3]]))
    first, last = blocks[0].module, blocks[-1].module
    assert last.get_parameter("words.weight") is first.get_parameter("words.weight")
    assert blocks[2].module.gain is blocks[4].module.gain is model.gain
    assert blocks[2].module.shift is model.shift
    assert all("shift" not in block.module.state_dict() for block in blocks)


def test_cuts_may_be_an_attribute_and_name_what_is_inside() -> None:
    model = Net()
    model.cuts = ("head", "body.1")
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["stem", "body.1", "head"]
    assert_same(model, blocks, torch.randn(5, 6))
    assert [block.name for block in blocks_of(model, cuts=("stem", "head"))] == ["stem", "head"]


class Depth(nn.Module):
    """Layers that are skipped at random: no recording can be right."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + float(torch.rand(()) < 0.5) * self.layer(x)


class ByValue(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


@pytest.mark.parametrize("kind", [Depth, ByValue])
def test_a_submodule_that_cannot_be_recorded_stays_whole(kind: type[nn.Module]) -> None:
    model = Around(kind(4))
    state = torch.get_rng_state()
    blocks = blocks_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [block.name for block in blocks] == ["before", "inner", "after"]
    assert blocks[1].module.inner is model.inner
    for _ in range(4):
        x = torch.randn(3, 4)
        torch.manual_seed(int(x.sum() * 100) % 97)
        assert_same(model, blocks, x)


@pytest.mark.parametrize("kind", [Depth, ByValue])
def test_a_model_that_cannot_be_recorded(kind: type[nn.Module]) -> None:
    with pytest.raises(
        UserError, match=f"{kind.__name__} cannot be cut .* pass an nn.Sequential, a list of blocks"
    ):
        blocks_of(kind(4))


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "amoebanet_d"])
def test_our_models_inside_another_one(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.model(x)

    options = {"layers": 3, "filters": 16} if name == "amoebanet_d" else {}
    torch.manual_seed(0)
    model = Scaled(models.build(name, classes=5, image_size=32, **options))
    blocks = blocks_of(model)
    assert len(blocks) > 2
    assert_same(model, blocks, torch.randn(3, 3, 32, 32))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x).mul_(2)))


def test_what_works_in_place_goes_with_what_it_overwrites() -> None:
    model = InPlace()
    blocks = blocks_of(model)
    assert [block.name for block in blocks] == ["one", "two"]
    assert_same(model, blocks, torch.randn(3, 2))


@pytest.mark.parametrize(
    ("model", "cut", "message"),
    [
        (Net(), "steam", "no submodule 'steam'. Did you mean 'stem'?"),
        (InPlace(), "unused", "does not call 'unused' itself"),
        (InPlace(), "act", "no block can begin at 'act': .* in place"),
        (Around(ByValue(4)), "inner.layer", "'inner' stays whole"),
        (Around(nn.MultiheadAttention(4, 1)), "inner.out_proj", "stays whole|does not call"),
    ],
)
def test_cuts_that_cannot_be_made(model: nn.Module, cut: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        blocks_of(model, (cut,))

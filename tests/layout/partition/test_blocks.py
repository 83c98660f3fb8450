"""The blocks of a sequence are the model: same values, same gradients, same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole import UserError, models
from farandole.layout.partition.blocks import Block, blocks_of

SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"image_size": 63},
    "googlenet": {"image_size": 31, "auxiliary": True},
    "resnet18": {"image_size": 8},
    "resnet110_v2": {"image_size": 8},
    "amoebanet_d": {"image_size": 32, "layers": 3, "filters": 16},
    "mlp": {"image_size": 8},
}


def in_order(blocks: list[Block], value: Any) -> Any:
    for block in blocks:
        # A stage receives a leaf that wants a gradient; no block may overwrite it.
        versions = [tensor._version for tensor in tensors(value)]
        result = block.module(value)
        assert [tensor._version for tensor in tensors(value)] == versions, block.name
        value = result
    return value


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def outcome(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(3)  # for dropout
    model.zero_grad()
    output = tensors(run(x))
    sum(each.square().sum() for each in output).backward()
    return [*output, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("name", SMALL)
def test_the_blocks_of_our_models_are_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, classes=5, **SMALL[name])
    blocks = blocks_of(model)
    assert len(blocks) >= len(model)
    side = SMALL[name]["image_size"]
    x = torch.randn(3, models.spec(name).channels, side, side)
    expected = outcome(model, model, x)
    found = outcome(model, lambda x: in_order(blocks, x), x)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    held = {
        id(tensor) for _, block in blocks for tensor in block.state_dict(keep_vars=True).values()
    }
    assert held == {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}


def test_nested_sequences_are_opened_and_keep_their_names() -> None:
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())))
    model.add_module("head", nn.Linear(2, 2))
    assert [block.name for block in blocks_of(model)] == ["features.0", "features.1.0", "head"]
    assert blocks_of(model)[0].module is model.features[0]


def test_a_module_that_comes_twice_is_two_blocks() -> None:
    layer = nn.Linear(2, 2)
    blocks = blocks_of(nn.Sequential(layer, nn.Tanh(), layer))
    assert [block.name for block in blocks] == ["0", "1", "2"]
    assert blocks[0].module is blocks[2].module


def test_a_layer_in_place_goes_with_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU())
    assert [block.name for block in blocks_of(model)] == ["0", "2", "3"]


def test_a_sequence_that_does_more_than_run_its_children_is_not_opened() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    watched = nn.Sequential(nn.Tanh())
    watched.register_forward_hook(lambda module, arguments, result: 3 * result)
    blocks = blocks_of(nn.Sequential(Doubled(nn.Tanh()), watched))
    assert [block.name for block in blocks] == ["0", "1"]
    assert in_order(blocks, torch.ones(1)) == 3 * (2 * torch.ones(1).tanh()).tanh()


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_a_list_of_modules(kind: Any) -> None:
    layers = [nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1))]
    assert [block.name for block in blocks_of(kind(layers))] == ["0", "1.0", "1.1"]


def test_cuts_join_the_blocks_of_a_sequence() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)
    )
    blocks = blocks_of(model, cuts=("2",))
    assert [block.name for block in blocks] == ["0", "2.0"]
    x = torch.randn(2, 2)
    assert torch.equal(in_order(blocks, x), model(x))
    model.cuts = ("1", "3")
    assert [block.name for block in blocks_of(model)] == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("model", "cuts", "message"),
    [
        (nn.Sequential(), (), "no blocks"),
        ([], (), "no blocks"),
        ([nn.Tanh(), torch.tanh], (), "Block 1 of the model is a builtin"),
        (nn.Sequential(nn.Linear(1, 1)), ("O",), "no block 'O'. Known: 0"),
        (
            nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True)),
            ("1",),
            "in place .* Cut before '0'",
        ),
    ],
)
def test_what_cannot_be_cut(model: Any, cuts: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        blocks_of(model, cuts)

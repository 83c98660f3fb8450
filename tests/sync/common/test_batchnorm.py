"""`SharedBatchNorm` over ranks against torch's own BatchNorm over the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farandole.sync import AllReduce
from farandole.sync.common.batchnorm import SharedBatchNorm, synchronise_batchnorm
from farandole.testing import run_world
from farandole.train import Run

LAYERS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "flat": (nn.BatchNorm1d, ()),
    "1d": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}


def batch(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 7


def cut(whole: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(whole.split(lengths))


def by_ranks(
    folder: Path, layer: nn.Module, batches: list[torch.Tensor], lengths: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], nn.Module, dict[str, torch.Tensor]]:
    """Outputs and input gradients of all batches put together, rank 0's layer, and the sums over
    ranks of its parameters' gradients, after a forward and a backward pass of each batch."""

    def body(run: Run) -> Any:
        mine = synchronise_batchnorm(copy.deepcopy(layer), run.group)
        assert isinstance(mine, SharedBatchNorm)
        outputs, gradients = [], []
        for whole in batches:
            x = cut(whole, lengths)[run.rank].clone().requires_grad_()
            y = mine(x)
            (y * y * cut(weights(whole), lengths)[run.rank]).sum().backward()
            outputs.append(y.detach())
            gradients.append(x.grad)
        grads = {
            name: run.group.all_reduce(parameter.grad.clone())
            for name, parameter in mine.named_parameters()
            if parameter.grad is not None
        }
        return outputs, gradients, mine, grads

    results = run_world(len(lengths), body, folder=folder)
    steps = range(len(batches))
    outputs = [torch.cat([ranks[0][step] for ranks in results]) for step in steps]
    gradients = [torch.cat([ranks[1][step] for ranks in results]) for step in steps]
    return outputs, gradients, results[0][2], results[0][3]


def weights(whole: torch.Tensor) -> torch.Tensor:
    """So that the loss treats no two elements alike."""
    return torch.linspace(-1, 2, whole.numel(), dtype=whole.dtype).view_as(whole)


def assert_same(
    folder: Path, layer: nn.Module, batches: list[torch.Tensor], lengths: list[int]
) -> None:
    outputs, gradients, ours, grads = by_ranks(folder, layer, batches, lengths)
    theirs = copy.deepcopy(layer)
    for step, whole in enumerate(batches):
        x = whole.clone().requires_grad_()
        y = theirs(x)
        (y * y * weights(whole)).sum().backward()
        torch.testing.assert_close(outputs[step], y.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(gradients[step], x.grad, rtol=1e-9, atol=1e-10)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-9)
    assert dict(ours.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.7},
    ],
    ids=str,
)
def test_like_torch_on_the_whole_batch(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    make, inner = LAYERS[kind]
    layer = make(3, dtype=torch.float64, **options)
    if options.get("affine", True):
        nn.init.uniform_(layer.weight, 0.5, 2.0)
        nn.init.uniform_(layer.bias, -1.0, 1.0)
    batches = [batch((7, 3, *inner), seed) for seed in range(3)]
    assert_same(tmp_path, layer, batches, [3, 1, 3])


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    channels=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_ranks_may_hold_different_numbers_of_samples(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], channels: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("uneven")
    layer = nn.BatchNorm2d(channels, dtype=torch.float64)
    assert_same(folder, layer, [batch((sum(lengths), channels, 2, 2), seed)], lengths)


def test_a_large_mean_does_not_cancel(tmp_path: Path) -> None:
    """The square of a sum would lose all digits of this variance in single precision."""
    layer = nn.BatchNorm1d(2)
    whole = (batch((8, 2), 0) * 0.01 + 10_000).float()
    outputs, _, _, _ = by_ranks(tmp_path, layer, [whole], [4, 4])
    exact = (whole.double() - whole.double().mean(0)) / (
        whole.double().var(0, unbiased=False) + layer.eps
    ).sqrt()
    torch.testing.assert_close(outputs[0].double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["mixed", "all half"])
def test_half_precision(tmp_path: Path, dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    """Sums are taken in single precision: 200² · 512 is far beyond what float16 can hold."""
    layer = nn.BatchNorm1d(2, dtype=parameters or dtype)
    whole = torch.full((512, 2), 200.0, dtype=dtype)
    whole[::2] = -200
    outputs, gradients, ours, _ = by_ranks(tmp_path, layer, [whole], [200, 312])
    assert outputs[0].dtype == gradients[0].dtype == dtype
    assert outputs[0].isfinite().all()
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(outputs[0].float(), whole.float() / 200, rtol=1e-2, atol=0)
    assert ours.get_buffer("running_var").isfinite().all()


@pytest.mark.parametrize("track", [True, False])
def test_evaluation_is_torch_s_own_and_asks_nobody(tmp_path: Path, track: bool) -> None:
    """One rank may evaluate while the others do something else."""
    layer = nn.BatchNorm2d(3, track_running_stats=track)
    x = torch.randn(4, 3, 2, 2)
    if track:
        layer(x)
    layer.eval()

    def body(run: Run) -> torch.Tensor | None:
        ours = synchronise_batchnorm(copy.deepcopy(layer), run.group)
        assert not ours.training
        return ours(x) if run.rank == 0 else None

    assert torch.equal(run_world(2, body, folder=tmp_path)[0], layer(x))


def test_a_layer_without_bias(tmp_path: Path) -> None:
    layer = nn.BatchNorm2d(3, dtype=torch.float64)
    layer.register_parameter("bias", None)
    assert_same(tmp_path, layer, [batch((5, 3, 2, 2), seed) for seed in range(2)], [2, 3])


def test_nothing_flows_to_frozen_parameters(tmp_path: Path) -> None:
    layer = nn.BatchNorm1d(3, dtype=torch.float64).requires_grad_(False)
    _, gradients, ours, grads = by_ranks(tmp_path, layer, [batch((6, 3), 1)], [2, 4])
    assert gradients[0].abs().sum() > 0
    assert grads == {}
    assert all(parameter.grad is None for parameter in ours.parameters())


class Twice(nn.Module):
    """One BatchNorm in three places, two of them in the same module, and one that is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.again = self.first
        self.body = nn.Sequential(nn.Linear(4, 4), self.first, nn.Sequential(nn.BatchNorm1d(4)))
        self.register_module("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.body(self.first(x)))


def test_replacing_keeps_parameters_names_and_sharing(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = Twice().eval()
        model.body[2].train()
        names = list(model.state_dict())
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        replaced = synchronise_batchnorm(model, run.group)
        assert replaced is model
        assert not any(type(module) is nn.BatchNorm1d for module in model.modules())
        assert isinstance(model.first, SharedBatchNorm)
        assert model.again is model.first
        assert model.body[1] is model.first
        assert (model.first.training, model.body[2][0].training) == (False, True)
        assert list(model.state_dict()) == names
        now = list(model.parameters())
        assert all(a is b for a, b in zip(now, parameters, strict=True))
        assert all(a is b for a, b in zip(now, optimizer.param_groups[0]["params"], strict=True))
        before = model.first
        assert synchronise_batchnorm(model, run.group).first is before  # once is enough

    run_world(1, body, folder=tmp_path)


def test_other_layers_stay_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3))
    kinds = [type(layer) for layer in model]

    def body(run: Run) -> None:
        assert [type(layer) for layer in synchronise_batchnorm(model, run.group)] == kinds

    run_world(1, body, folder=tmp_path)


def test_on_request_only(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[bool, bool, bool]:
        def kind(sync: AllReduce) -> bool:
            model = run.distribute(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), sync=sync)
            return isinstance(run.unwrap(model)[1], SharedBatchNorm)

        alone = run_world(1, lambda other: kind_alone(other), folder=tmp_path)[0]
        return kind(AllReduce()), kind(AllReduce(batchnorm="sync")), alone

    def kind_alone(run: Run) -> bool:
        model = run.distribute(nn.BatchNorm1d(2), sync=AllReduce(batchnorm="sync"))
        return isinstance(model, SharedBatchNorm)

    assert run_world(2, body, folder=tmp_path) == [(False, True, False)] * 2


def test_a_synchronised_model_can_be_copied_and_its_state_loaded_by_a_plain_one(
    tmp_path: Path,
) -> None:
    def body(run: Run) -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        ours = synchronise_batchnorm(copy.deepcopy(plain), run.group)
        ours(torch.randn(3, 4, generator=torch.Generator().manual_seed(run.rank)))
        average = copy.deepcopy(ours)
        assert average[1].group is run.group
        plain.load_state_dict(average.state_dict())
        assert torch.equal(plain[1].running_mean, ours[1].running_mean)
        assert plain[1].running_mean.any()

    run_world(2, body, folder=tmp_path)


def test_input_of_one_dimension_is_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        layer = synchronise_batchnorm(nn.BatchNorm1d(3), run.group)
        with pytest.raises(ValueError, match=r"at least 2 dimensions, got \(3,\)"):
            layer(torch.zeros(3))

    run_world(1, body, folder=tmp_path)

"""`hvd.SyncBatchNorm` over ranks against torch's own BatchNorm over the whole batch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from farandole.horovod import session
from farandole.horovod.common.exceptions import NotInitialisedError
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.torch.mpi_ops import Sum, add_process_set, allreduce, rank
from farandole.horovod.torch.optimizer import DistributedOptimizer
from farandole.horovod.torch.sync_batch_norm import SyncBatchNorm
from farandole.testing.horovod import run_horovod

LENGTHS = {1: [5], 2: [2, 5], 4: [3, 1, 2, 4]}
SIZES = pytest.mark.parametrize("ranks", LENGTHS)


def batch(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 7


def weights(whole: torch.Tensor) -> torch.Tensor:
    """So that the loss treats no two elements alike."""
    return torch.linspace(-1, 2, whole.numel(), dtype=whole.dtype).view_as(whole)


def of(model: nn.Module, like: nn.Module) -> nn.Module:
    model.double().load_state_dict(like.state_dict())
    return model


def trained(
    model: nn.Module, batches: list[torch.Tensor], lengths: list[int], part: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Outputs and input gradients of its part of each batch, parameters' gradients, and buffers."""
    found = []
    for whole in batches:
        x = whole.split(lengths)[part].clone().requires_grad_()
        y = model(x)
        (y * y * weights(whole).split(lengths)[part]).sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found, grads, dict(model.named_buffers())


def compare(make: Any, plain: nn.Module, batches: list[torch.Tensor], ranks: int) -> None:
    """Each rank, with a model that `make` gives it, against `plain` on the whole batches."""
    lengths = LENGTHS[ranks]
    results = run_horovod(ranks, lambda: trained(make(), batches, lengths, rank()))
    exact, grads, buffers = trained(plain, batches, [sum(lengths)], 0)
    for index, expected in enumerate(exact):
        found = torch.cat([result[0][index] for result in results])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    for name, expected in grads.items():  # of weight and bias each rank has its own samples' share
        found = sum(result[1][name] for result in results)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for _, _, mine in results:
        assert mine.keys() == buffers.keys()
        for name, expected in buffers.items():
            torch.testing.assert_close(mine[name], expected, rtol=1e-12, atol=1e-12)


@SIZES
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
@pytest.mark.parametrize(
    ("kind", "inner"), [(nn.BatchNorm1d, ()), (nn.BatchNorm2d, (3, 4))], ids=["1d", "2d"]
)
def test_like_torch_on_the_whole_batch(
    ranks: int, kind: Any, inner: tuple[int, ...], options: dict[str, Any]
) -> None:
    plain = kind(3, dtype=torch.float64, **options)
    if options.get("affine", True):
        plain.weight.data.copy_(torch.tensor([0.5, 1.5, 2.0]))
        plain.bias.data.copy_(torch.tensor([-1.0, 0.3, 2.0]))
    twin = copy.deepcopy(plain)
    batches = [batch((sum(LENGTHS[ranks]), 3, *inner), seed) for seed in range(2)]
    compare(lambda: of(SyncBatchNorm(3, **options), twin), plain, batches, ranks)


@SIZES
def test_a_model_of_several_layers_one_of_them_used_twice(ranks: int) -> None:
    def network() -> nn.Module:
        again = nn.BatchNorm1d(3)
        return nn.Sequential(
            nn.Linear(3, 3), again, nn.Tanh(), nn.Linear(3, 3), nn.BatchNorm1d(3), again
        ).double()

    plain = network()
    twin = copy.deepcopy(plain)
    batches = [batch((sum(LENGTHS[ranks]), 3), seed) for seed in range(2)]
    compare(
        lambda: SyncBatchNorm.convert_sync_batchnorm(of(network(), twin)), plain, batches, ranks
    )


def test_training_equals_that_of_one_process_on_the_whole_batch() -> None:
    def network() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        for number, parameter in enumerate(model.double().parameters()):
            parameter.data = torch.linspace(-1, number, parameter.numel()).view_as(parameter)
        return model.double()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> list[float]:
        for seed in range(4):
            optimizer.zero_grad()
            model(batch((8, 3), seed)[part]).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    def body() -> list[float]:
        model = SyncBatchNorm.convert_sync_batchnorm(network())
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters()
        )
        return train(model, optimizer, slice(4 * rank(), 4 * rank() + 4))

    plain = network()
    alone = train(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), slice(None))
    assert run_horovod(2, body) == [pytest.approx(alone, rel=1e-9)] * 2


def test_layers_have_names_of_their_own_and_the_same_on_all_ranks() -> None:
    """Also where a rank has made more layers than others, and after a copy."""

    def body() -> list[list[int]]:
        layers = [SyncBatchNorm(2) for _ in range(3 if rank() == 0 else 2)][-2:]
        layers.append(copy.deepcopy(layers[0]))
        for layer in layers:
            layer(torch.ones(2, 2) * rank())
        again = copy.deepcopy(layers[1])
        again(torch.ones(2, 2))
        first = [layer._number() for layer in [*layers, again]]
        here = session.holder()
        other = copy.copy(here.session)  # as after another hvd.init()
        assert other is not None
        other.counters = type(other.counters)()
        here.session, kept = other, here.session
        second = [layer._number() for layer in reversed(layers)]
        here.session = kept
        return [first, second]

    assert run_horovod(2, body) == [[[0, 1, 2, 3], [0, 1, 2]]] * 2


def test_over_some_ranks_only() -> None:
    def body() -> torch.Tensor:
        some = add_process_set(ProcessSet([0, 2]))
        layer = SyncBatchNorm(2, process_set=some)
        x = torch.full((1, 2), float(rank()))
        if some.included():
            layer(x)
        else:
            with pytest.raises(ValueError, match="rank 1 is not in the process set"):
                layer(x)
        return layer.running_mean

    means = [mean.tolist() for mean in run_horovod(3, body)]
    assert means == [pytest.approx([0.1, 0.1]), [0.0, 0.0], pytest.approx([0.1, 0.1])]


def test_evaluation_asks_nobody() -> None:
    def body() -> None:
        layer = SyncBatchNorm(2).eval()
        if rank() == 0:
            assert torch.equal(layer(torch.ones(1, 2)), nn.BatchNorm1d(2).eval()(torch.ones(1, 2)))
        assert allreduce(torch.ones(1), op=Sum).item() == 2

    run_horovod(2, body)


def test_half_precision_is_summed_in_single() -> None:
    def body() -> torch.Tensor:
        x = torch.full((300, 2), 200.0, dtype=torch.float16)
        x[::2] = -200
        y = SyncBatchNorm(2)(x.requires_grad_())
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is torch.float16
        return y.detach() * 200 - x.detach()

    for error in run_horovod(2, body):
        assert error.dtype is torch.float16
        assert error.abs().max() < 1


def test_converting_keeps_parameters_names_and_modes() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
        parameters, names = list(model.parameters()), list(model.state_dict())
        some = ProcessSet([0])
        converted = SyncBatchNorm.convert_sync_batchnorm(model, process_set=some)
        assert converted is model
        assert [type(layer) for layer in model][1:] == [SyncBatchNorm] * 2
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == names
        assert [layer.training for layer in model] == [True, True, False]
        assert model[1].process_set is some
        alone = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3))
        assert isinstance(alone, SyncBatchNorm)
        assert SyncBatchNorm.convert_sync_batchnorm(alone) is alone

    run_horovod(1, body)


def test_a_model_can_be_copied_and_stored_after_use() -> None:
    def body() -> None:
        layer = SyncBatchNorm(2)
        layer(torch.ones(3, 2) * rank())
        content = io.BytesIO()
        torch.save(layer, content)
        content.seek(0)
        back = torch.load(content, weights_only=False)
        assert torch.equal(back.running_mean, layer.running_mean)
        back(torch.ones(2, 2))
        plain = nn.BatchNorm1d(2)
        plain.load_state_dict(copy.deepcopy(layer).state_dict())
        assert torch.equal(plain.running_mean, layer.running_mean)

    run_horovod(2, body)


def test_errors() -> None:
    with pytest.raises(NotInitialisedError):
        SyncBatchNorm(2)(torch.ones(3, 2))

    def body() -> None:
        with pytest.raises(ValueError, match=r"at least 2 dimensions, got \(3,\)"):
            SyncBatchNorm(3)(torch.ones(3))

    run_horovod(1, body)

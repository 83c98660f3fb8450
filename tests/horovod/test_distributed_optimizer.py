"""`hvd.DistributedOptimizer`: parity with one process that has the whole batch, and the errors."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.torch.compression import Compressor
from farandole.testing.horovod import run_horovod

SIZES = pytest.mark.parametrize("size", [1, 2, 4])
STEPS = 3
BATCH = 8
Make = Callable[..., torch.optim.Optimizer]
Params = list[torch.Tensor]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fill(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(drawn(100 + number, *p.shape) * 0.3)
    return model.double()


def small_net() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(step, BATCH, 3), drawn(50 + step, BATCH, 2)


def own_part(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step)
    return x.chunk(hvd.size())[hvd.rank()], y.chunk(hvd.size())[hvd.rank()]


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, **options)


def parameters(model: nn.Module) -> Params:
    return [p.detach().clone() for p in model.parameters()]


def plain(make: Make = sgd, steps: int = STEPS, factor: float = 1.0) -> Params:
    """One process, the whole batch."""
    model = small_net()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        (factor * F.mse_loss(model(x), y)).backward()
        optimizer.step()
    return parameters(model)


def close(found: Params, expected: Params, tolerance: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def train(optimizer: Any, model: nn.Module, **zero: bool) -> Params:
    for step in range(STEPS):
        optimizer.zero_grad(**zero)
        x, y = own_part(step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return parameters(model)


def check(
    size: int, body: Callable[[], Params], expected: Params, tolerance: float = 1e-12
) -> None:
    results = run_horovod(size, body)
    for result in results:
        close(result, expected, tolerance)
        assert all(map(torch.equal, result, results[0]))  # the same bits on all ranks


# Parity


class Odd(Compressor):
    """A user's own, which sends more numbers in some steps than in others."""

    calls = threading.local()

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        cls.calls.count = getattr(cls.calls, "count", 0) + 1
        often = 1 + cls.calls.count // 4 % 2  # of a model with four parameters
        return tensor.reshape(-1).repeat(often), tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor[: ctx.numel()].reshape(ctx)


OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "unnamed": lambda model: {},
    "an average in two steps": lambda model: {"gradient_predivide_factor": 4.0},
    "two groups": lambda model: {"groups": 2},
    "more groups than parameters": lambda model: {"groups": 99},
    "no groups": lambda model: {"groups": 0},
    "groups by hand": lambda model: {"groups": [list(model[0].parameters()), [model[2].weight]]},  # type: ignore[index]
    "own compressor": lambda model: {"compression": Odd},
    "own compressor, grouped": lambda model: {"compression": Odd, "groups": 2},
    "sparse as dense": lambda model: {"sparse_as_dense": True},
}


@SIZES
@pytest.mark.parametrize("options", OPTIONS)
def test_as_one_process_with_the_whole_batch(size: int, options: str) -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **OPTIONS[options](model))
        return train(optimizer, model)

    check(size, body, plain())


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_adam_and_both_ways_to_forget_gradients(size: int, set_to_none: bool) -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters())
        return train(optimizer, model, set_to_none=set_to_none)

    check(size, body, plain(adam))


@SIZES
def test_forgetting_gradients_through_the_model(size: int) -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for step in range(STEPS):
            model.zero_grad()
            x, y = own_part(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return parameters(model)

    check(size, body, plain())


@SIZES
def test_compression_to_half(size: int) -> None:
    def body() -> Params:
        model = small_net()
        options = {"compression": hvd.Compression.fp16, "groups": 1}
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
        result = train(optimizer, model)
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        return result

    check(size, body, plain(), 3e-3)


@SIZES
def test_a_sum(size: int) -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Sum)
        return train(optimizer, model)

    check(size, body, plain(factor=float(size)))


@SIZES
@pytest.mark.parametrize("groups", [None, 2])
def test_several_backward_passes_in_a_step(size: int, groups: int | None) -> None:
    """Their gradients add up, on each rank, before they are sent."""

    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), backward_passes_per_step=2, groups=groups
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = own_part(step)
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(model(part_x), part_y) / 2).backward()
            optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        x, y = own_part(STEPS)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return parameters(model)

    check(size, body, plain(steps=STEPS + 1))


def test_a_step_before_all_passes_are_done() -> None:
    """The last batches of an epoch may be too few."""

    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=5)
        return train(optimizer, model)

    check(2, body, plain())


# Adasum


@SIZES
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_adasum_combines_steps(size: int, compression: type[Compressor]) -> None:
    def local_steps() -> list[Params]:
        """What each rank would do alone, from the same parameters."""
        steps = []
        for rank in range(size):
            model = small_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x, y = (part.chunk(size)[rank] for part in batch(0))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            start = parameters(small_net())
            steps.append([p - s for p, s in zip(parameters(model), start, strict=True)])
        return steps

    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=compression,
            op=hvd.Adasum,
        )
        x, y = own_part(0)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.synchronize()  # does nothing
        optimizer.step()
        return parameters(model)

    expected = [
        start + _adasum([step[i] for step in local_steps()])
        for i, start in enumerate(parameters(small_net()))
    ]
    tolerance = 1e-10 if compression is hvd.Compression.none else 1e-3
    check(size, body, expected, tolerance)


def _adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a
            + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in pairs
        ]
    return vectors[0]


def test_what_adasum_has_no_use_for() -> None:
    def body() -> None:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
        with pytest.raises(AssertionError, match="with Adasum nothing is synchronized"):
            optimizer.skip_synchronize()
        with pytest.raises(UserError, match="must be 1 or more"):
            optimizer.set_backward_passes_per_step(0)
        with pytest.raises(UserError, match="groups are for gradients"):
            hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum, groups=2)

    run_horovod(1, body)


# Sparse gradients


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.words(x))
        return result


@SIZES
@pytest.mark.parametrize("sparse_as_dense", [True, False])
@pytest.mark.parametrize("groups", [None, 1])
def test_an_embedding(size: int, sparse_as_dense: bool, groups: int | None) -> None:
    words = torch.tensor([0, 5, 2, 2, 3, 0, 1, 5])

    def body() -> Params:
        model = fill(Words())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            sparse_as_dense=sparse_as_dense,
            groups=groups,
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(words.chunk(size)[hvd.rank()]).square().mean().backward()
            optimizer.step()
        return parameters(model)

    model = fill(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()
    check(size, body, parameters(model))


def test_an_embedding_that_a_rank_does_not_use_in_some_step() -> None:
    """It has been sparse before, so the others' entries are what this rank takes part in."""

    def body() -> None:
        model = fill(Words())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            x = torch.tensor([1, 2])
            used = step == 0 or hvd.rank() == 0
            (model(x) if used else model.out(torch.ones(1, 3).double())).sum().backward()
            optimizer.step()

    run_horovod(2, body)


@SIZES
@pytest.mark.parametrize("sparse_as_dense", [True, False])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_an_optimizer_that_takes_sparse_gradients_alone(
    size: int, sparse_as_dense: bool, compression: Any
) -> None:
    """Also on a rank that does not use its words in the first step."""
    batches = torch.tensor([[1, 2, 4], [4, 3, 5], [1, 1, 4], [5, 2, 0]])

    def body() -> Params:
        words = fill(nn.Embedding(6, 3, sparse=True))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(words.parameters()), lr=0.1),
            sparse_as_dense=sparse_as_dense,
            compression=compression if sparse_as_dense else hvd.Compression.none,
        )
        for step in range(3):
            optimizer.zero_grad()
            if step > 0 or hvd.rank() == 0:
                words(batches[hvd.rank()]).square().sum().backward()
            optimizer.step()
            assert words.weight.grad is not None
            assert words.weight.grad.is_sparse
        return parameters(words)

    words = fill(nn.Embedding(6, 3, sparse=True))
    optimizer = torch.optim.SparseAdam(list(words.parameters()), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        used = batches[: size if step else 1]
        (words(used).square().sum() / size).backward()
        optimizer.step()
    is_rounded = sparse_as_dense and compression is hvd.Compression.fp16
    check(size, body, parameters(words), 1e-2 if is_rounded else 1e-12)


# Models that do not use all they have, or not in one order


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, order: int) -> torch.Tensor:
        """The order in which gradients come back is that of the layers' last use, reversed."""
        if order == 0:
            return self.left(x) + self.right(x) * 2  # type: ignore[no-any-return]
        if order == 1:
            return self.right(x) * 2 + self.left(x)  # type: ignore[no-any-return]
        return self.left(x)  # type: ignore[no-any-return]


@SIZES
def test_branches_in_another_order_on_each_rank_and_layers_not_used(size: int) -> None:
    def body() -> Params:
        model = fill(Branches())
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = own_part(step)
            order = 2 if hvd.rank() == size - 1 else (hvd.rank() + step) % 2
            F.mse_loss(model(x, order), y).backward()
            optimizer.step()
        return parameters(model)

    model = fill(Branches())
    optimizer = sgd(model.parameters())
    for p in model.never.parameters():
        p.grad = torch.zeros_like(p)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x, y = batch(step)
        parts = zip(x.chunk(size), y.chunk(size), strict=True)
        for rank, (part_x, part_y) in enumerate(parts):
            loss = F.mse_loss(model(part_x, 2 if rank == size - 1 else 0), part_y)
            (loss / size).backward()
        optimizer.step()
    check(size, body, parameters(model))


def test_frozen_parameters_are_left_alone() -> None:
    def body() -> None:
        model = small_net()
        model[0].requires_grad_(False)  # type: ignore[index]
        before = parameters(model)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        after = train(optimizer, model)
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
            True,
            True,
            False,
            False,
        ]

    run_horovod(2, body)


def test_channels_last() -> None:
    def net() -> nn.Module:
        return fill(nn.Conv2d(3, 4, 2))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).square().mean()
        return result

    images = drawn(7, 4, 3, 5, 5)

    def body() -> Params:
        model = net().to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), groups=hvd.rank() * 0 + 1)
        mine = images.chunk(2)[hvd.rank()].to(memory_format=torch.channels_last)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(model, mine).backward()
            optimizer.step()
        return parameters(model)

    model = net()
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model, images).backward()
        optimizer.step()
    check(2, body, parameters(model))


# Several optimizers, process sets


def test_several_optimizers_with_the_same_names() -> None:
    def body() -> Params:
        models = [small_net(), small_net()]
        optimizers = [
            hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
            for model in models
        ]
        for step in range(STEPS):
            x, y = own_part(step)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        close(parameters(models[0]), parameters(models[1]), 0.0)
        return parameters(models[0])

    check(2, body, plain())


def test_several_optimizers_of_which_ranks_use_another_first() -> None:
    """Both are made in the same order everywhere; which backward pass comes first is free."""

    def body() -> None:
        models = [nn.Linear(2, 1).double(), nn.Linear(2, 1).double()]
        for number, model in enumerate(models):
            nn.init.constant_(model.weight, 0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            models[number].optimizer = hvd.DistributedOptimizer(optimizer)  # type: ignore[assignment]
        order = (0, 1) if hvd.rank() == 0 else (1, 0)
        for number in order:
            x = torch.full((1, 2), number + 1.0, dtype=torch.float64)
            models[number](x).sum().backward()
        for number in order:
            models[number].optimizer.step()  # type: ignore[operator, union-attr]
        assert models[0].weight.tolist() == [[-1.0, -1.0]]
        assert models[1].weight.tolist() == [[-2.0, -2.0]]

    run_horovod(2, body)


def test_a_process_set() -> None:
    """Its ranks train together; the others each alone."""

    def body() -> Params:
        pair = hvd.add_process_set([0, 2])
        model = small_net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), process_set=pair
        )
        part = {0: 0, 2: 1, 1: 0}[hvd.rank()]
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            if pair.included():
                x, y = x.chunk(2)[part], y.chunk(2)[part]
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        with pytest.raises(UserError, match=r"is not known. Add it"):
            hvd.DistributedOptimizer(
                sgd(small_net().parameters()), process_set=hvd.ProcessSet([0, 1])
            )
        return parameters(model)

    for result in run_horovod(3, body):
        close(result, plain())


# How scripts use it


def test_clipping_between_synchronize_and_step() -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = own_part(step)
            F.mse_loss(model(x), y).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        return parameters(model)

    model = small_net()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    check(2, body, parameters(model))


def test_synchronizing_twice_is_told() -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.warns(UserWarning, match="slowdown") as told:
            optimizer.step()
        assert [str(one.message) for one in told] == [
            "optimizer.step() called without optimizer.skip_synchronize() context after "
            "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
            "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your "
            "code."
        ]
        close([p.grad for p in model.parameters() if p.grad is not None], before)
        return parameters(model)

    results = []
    with warnings.catch_warnings():  # which is one for all threads
        warnings.simplefilter("always")
        results = run_horovod(1, body)
    close(results[0], plain(steps=1))


def test_a_loss_scale_that_finds_infinities() -> None:
    """As with torch.amp.GradScaler: unscaled when all ranks' gradients are there."""

    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(-1, STEPS):
            optimizer.zero_grad()
            x, y = own_part(max(step, 0))
            if step < 0 and hvd.rank() == 1:
                x = x * float("inf")  # then all ranks skip the step
            scaler.scale(F.mse_loss(model(x), y)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return parameters(model)

    check(2, body, plain())


@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_made_before_or_after(before: bool) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def body() -> Params:
        model = small_net()
        optimizer: Any = sgd(model.parameters())
        scheduler = schedule(optimizer) if before else None
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = scheduler or schedule(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = own_part(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**STEPS
        return parameters(model)

    model = small_net()
    optimizer = sgd(model.parameters())
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    check(2, body, parameters(model))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_closure(op: hvd.ReduceOp) -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=op)
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                x, y = batch(step)  # all have the same, so that Adasum too is the average
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), torch.Tensor)
        return parameters(model)

    check(2, body, plain())


def test_lbfgs_which_calls_its_closure_often() -> None:
    def minimise(optimizer: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Params:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        return parameters(model)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), max_iter=5)

    def body() -> Params:
        model = small_net()
        return minimise(hvd.DistributedOptimizer(make(model)), model, *batch(0))

    model = small_net()
    check(2, body, minimise(make(model), model, *batch(0)))


def test_hooks_of_the_optimizer_see_the_gradients_of_all() -> None:
    def body() -> None:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        seen: list[torch.Tensor] = []
        first = next(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: seen.append(first.grad.clone()))  # type: ignore[union-attr]
        train(optimizer, model)
        gathered = hvd.allgather(torch.stack(seen)[None])
        assert torch.equal(gathered[0], gathered[1])

    run_horovod(2, body)


# It is still the optimizer that was given


def test_it_is_what_was_given() -> None:
    def body() -> None:
        model = small_net()
        given = adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(given, model.named_parameters())
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert optimizer.param_groups is given.param_groups
        assert "lr: 0.05" in repr(optimizer)
        train(optimizer, model)
        plainly = adam(small_net().parameters())
        state = optimizer.state_dict()
        assert state.keys() == plainly.state_dict().keys()
        plainly.load_state_dict(state)  # into one that is not distributed
        other = small_net()
        second = hvd.DistributedOptimizer(adam(other.parameters()))
        second.load_state_dict(copy.deepcopy(plainly.state_dict()))
        other.load_state_dict(model.state_dict())
        close(train(optimizer, model), train(second, other), 0.0)

    run_horovod(2, body)


def test_loading_a_state_forgets_a_step_that_failed() -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        state = copy.deepcopy(optimizer.state_dict())
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        hvd.barrier()
        optimizer.load_state_dict(state)
        return train(optimizer, model)

    check(2, body, plain())


class Sometimes(Compressor):
    """On rank 1 something else than on the others, while it is broken."""

    broken = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        wrong = Sometimes.broken and hvd.rank() == 1 and tensor.dim() == 2
        return tensor.half() if wrong else tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


def test_after_a_step_that_failed_the_next_one_is_right() -> None:
    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), compression=Sometimes
        )
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(HorovodInternalError, match=r"0.weight.*float16"):
            optimizer.step()
        close(parameters(model), parameters(small_net()), 0.0)
        hvd.barrier()
        Sometimes.broken = False
        hvd.barrier()
        return train(optimizer, model)

    try:
        check(2, body, plain())
    finally:
        Sometimes.broken = True


def test_the_same_parameters_get_another_optimizer() -> None:
    """The one before is gone, with it what it would have sent."""

    def body() -> Params:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters())
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        model.zero_grad()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        return train(optimizer, model)

    check(2, body, plain())


# Errors


def bad_pairs(model: nn.Module) -> Iterator[Any]:
    yield from model.parameters()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda m: {"named_parameters": bad_pairs(m)}, "pairs of a name and a parameter"),
        (
            lambda m: {"named_parameters": [("x", p) for p in m.parameters()]},
            "several of the name x",
        ),
        (
            lambda m: {"named_parameters": list(m.named_parameters())[1:]},
            r"1 of the optimizer's 4 parameters are not in it; the first has the shape \(5, 3\)",
        ),
        (lambda m: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op is sum"),
        (lambda m: {"gradient_predivide_factor": 0.0}, "must be above 0"),
        (lambda m: {"backward_passes_per_step": 0}, "must be 1 or more"),
        (lambda m: {"groups": -1}, "must be 0 or more"),
        (lambda m: {"groups": list(m.parameters())}, "list of lists of parameters"),
        (lambda m: {"groups": [list(m.parameters())] * 2}, "stands in several groups"),
        (lambda m: {"op": "mean"}, "no reduction 'mean'"),
    ],
)
def test_wrong_arguments(options: Callable[[nn.Module], Any], message: str) -> None:
    def body() -> None:
        model = small_net()
        with pytest.raises(UserError, match=message):
            hvd.DistributedOptimizer(sgd(model.parameters()), **options(model))

    run_horovod(1, body)


def test_what_is_no_optimizer_or_is_one_already() -> None:
    def body() -> None:
        with pytest.raises(UserError, match=r"Linear is not a torch.optim.Optimizer"):
            hvd.DistributedOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
        for op in (hvd.Average, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(sgd(small_net().parameters()), op=op)
            with pytest.raises(UserError, match="a DistributedOptimizer already"):
                hvd.DistributedOptimizer(optimizer)

    run_horovod(1, body)


def test_the_old_name_of_groups() -> None:
    def body() -> Params:
        model = small_net()
        with pytest.warns(DeprecationWarning, match="use groups="):
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=2)
        assert len(optimizer._gradients._batches) == 2
        return train(optimizer, model)

    close(run_horovod(1, body)[0], plain())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameters_that_are_added_later(size: int, op: hvd.ReduceOp) -> None:
    def body() -> Params:
        model = small_net()
        first, last = model[0], model[2]  # type: ignore[index]
        optimizer = hvd.DistributedOptimizer(sgd(first.parameters()), op=op)
        optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.2})
        return train(optimizer, model)

    def two_rates(params: Any) -> torch.optim.Optimizer:
        given = list(params)
        return sgd([{"params": given[:2]}, {"params": given[2:], "lr": 0.2}])

    found = run_horovod(size, body)
    for other in found[1:]:
        close(other, found[0])
    if op == hvd.Average:
        close(found[0], plain(two_rates))


def test_what_is_frozen_for_a_while_is_not_sent() -> None:
    """A discriminator, while the generator is trained: momentum must not move it."""

    def body() -> None:
        model = small_net()
        last = model[2]  # type: ignore[index]
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(optimizer, model)
        optimizer.zero_grad()
        before = parameters(last)
        last.requires_grad_(False)
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert all(p.grad is None for p in last.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(last), strict=True))

    run_horovod(2, body)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_under_way_are_not_to_be_touched(size: int) -> None:
    def body() -> None:
        model = small_net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        x, y = own_part(0)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(AssertionError, match=r"before .*step.* call optimizer.synchronize\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="Raise backward_passes_per_step"):
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        optimizer.zero_grad()  # thrown away
        F.mse_loss(model(x), y).backward()
        optimizer.step()  # without a warning

    run_horovod(size, body)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameters_have_names_of_their_own_also_when_none_are_given(op: str) -> None:
    def body() -> set[str]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers[1].bias.requires_grad_(False)
        groups = [{"params": layer.parameters()} for layer in layers]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)
        names = optimizer._parameter_names
        assert names.keys() == set(layers.parameters())
        assert len(set(names.values())) == 4
        more = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [more]})
        assert len(set(optimizer._parameter_names.values())) == 5
        named = hvd.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=0.1), layers.named_parameters(), op=op
        )
        assert named._parameter_names == {p: name for name, p in layers.named_parameters()}
        return set(names.values())

    first, second = run_horovod(2, body)
    assert first == second

"""What scripts send around at their start: parameters, the optimizer's state, any object."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.torch import functions as hvd
from farandole.horovod.torch.mpi_ops import (
    Sum,
    add_process_set,
    allreduce,
    broadcast_async_,
    rank,
    size,
    synchronize,
)
from farandole.horovod.torch.optimizer import DistributedOptimizer
from farandole.testing.horovod import run_horovod

SIZES = pytest.mark.parametrize("ranks", [1, 2, 4])


def model_of(seed: int) -> nn.Module:
    """Parameters and buffers that differ between ranks, drawn from no shared generator."""
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2))
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) * 0.1 + seed + number)
    return model


def same_tree(left: Any, right: Any) -> bool:
    """Equal in type and value; tensors also in dtype."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same_tree(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_tree, left, right))
    return bool(left == right)


# Parameters


@SIZES
@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.state_dict(),
        lambda model: dict(model.named_parameters()) | dict(model.named_buffers()),
        lambda model: [*model.named_parameters(), *model.named_buffers()],
        lambda model: (item for item in model.state_dict().items()),
        lambda model: [*model.parameters(), *model.buffers()],
        lambda model: {"none": None, **model.state_dict()},
    ],
    ids=["state dict", "dict", "pairs", "iterator", "bare", "none"],
)
def test_parameters_become_the_roots(ranks: int, params: Callable[[nn.Module], Any]) -> None:
    root = ranks - 1

    def body() -> dict[str, torch.Tensor]:
        model = model_of(rank())
        hvd.broadcast_parameters(params(model), root_rank=root)
        assert all(p.requires_grad and p.grad_fn is None for p in model.parameters())
        return model.state_dict()

    expected = model_of(root).state_dict()
    for state in run_horovod(ranks, body):
        assert same_tree(dict(state), dict(expected))


def test_odd_tensors() -> None:
    """Of all dtypes, empty, without dimensions, in any stride, and of one name twice."""

    def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
        return [
            ("a", torch.full((3, 2), seed, dtype=torch.bfloat16)),
            ("a", torch.arange(6.0).view(2, 3).t() + seed),
            ("a", torch.arange(12.0).view(3, 4)[:, ::2] * seed),
            ("b", torch.tensor(seed)),
            ("c", torch.empty(0, 3)),
            ("d", torch.tensor([seed % 2 == 1, True])),
            ("e", torch.tensor([1j * seed])),
        ]

    def body() -> list[tuple[str, torch.Tensor]]:
        mine = tensors(rank() + 1)
        hvd.broadcast_parameters(mine, root_rank=0)
        return mine

    for found in run_horovod(2, body):
        assert same_tree(found, tensors(1))


def test_parameters_of_some_ranks() -> None:
    def body() -> float:
        some = add_process_set(ProcessSet([1, 3]))
        tensor = torch.full((2,), float(rank()))
        if some.included():
            hvd.broadcast_parameters({"x": tensor}, root_rank=3, process_set=some)
        return tensor[0].item()

    assert run_horovod(4, body) == [0.0, 3.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (torch.zeros(2), "cannot take a Tensor. Pass model.state_dict"),
        (3, "cannot take a int"),
        ("weights", "cannot take a str"),
        ({"x": torch.zeros(1), "lr": 0.1}, "'lr' is a float, .* hvd.broadcast_object"),
        ([("lr", "fast")], "'lr' is a str"),
        ({"x": torch.eye(2).to_sparse()}, "'x' is a torch.sparse_coo Tensor"),
    ],
)
def test_what_are_no_parameters(params: Any, message: str) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=message):
            hvd.broadcast_parameters(params, root_rank=0)

    run_horovod(2, body)


def test_a_root_that_is_not_there() -> None:
    def body() -> None:
        for call in (hvd.broadcast_parameters, hvd.broadcast_object):
            with pytest.raises(ValueError, match="5"):
                call({"x": torch.zeros(1)}, root_rank=5)

    run_horovod(2, body)


def test_shapes_that_differ_are_told_to_all_and_the_rest_arrives() -> None:
    def body() -> tuple[float, float]:
        params = {
            "a": torch.full((2,), float(rank())),
            "b": torch.zeros(2 + rank()),
            "c": torch.full((2,), float(rank())),
        }
        with pytest.raises(HorovodInternalError, match=r"broadcast\.b"):
            hvd.broadcast_parameters(params, root_rank=1)
        assert allreduce(torch.ones(1), op=Sum).item() == size()  # the job goes on
        return params["a"][0].item(), params["c"][0].item()

    assert run_horovod(2, body) == [(1.0, 1.0)] * 2


def test_a_name_in_flight_is_told_to_its_caller_and_the_rest_arrives() -> None:
    def body() -> float:
        pending = broadcast_async_(torch.zeros(1), 0, "b") if rank() == 0 else None
        last = torch.full((1,), float(rank()))
        params = {"a": torch.zeros(1 + rank()), "b": torch.zeros(1), "c": last}
        if rank() == 1:
            del params["b"]  # or what is in flight might end before its name is used again
        with pytest.raises(UserError if rank() == 0 else HorovodInternalError):
            hvd.broadcast_parameters(params, root_rank=1)
        if pending is None:
            pending = broadcast_async_(torch.zeros(1), 1, "b")
        with pytest.raises(HorovodInternalError, match=r"broadcast\.b"):
            synchronize(pending)
        return last.item()

    assert run_horovod(2, body) == [1.0, 1.0]


def test_ranks_may_name_their_parameters_in_different_orders() -> None:
    def body() -> list[float]:
        pairs = [(name, torch.tensor([float(rank()), ord(name)])) for name in "abc"]
        hvd.broadcast_parameters(pairs[::-1] if rank() else iter(pairs), root_rank=1)
        return [value for _, tensor in pairs for value in tensor.tolist()]

    assert run_horovod(3, body) == [[1.0, 97.0, 1.0, 98.0, 1.0, 99.0]] * 3


# Optimizers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, betas=(0.8, 0.99), amsgrad=True),
    "adamw tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), foreach=False),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),  # has state from the beginning
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model[0](x).square().sum().backward()
    optimizer.step()


@SIZES
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("others_have_state", [False, True])
def test_state_becomes_the_roots(ranks: int, kind: str, others_have_state: bool) -> None:
    def prepared(here: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of(here)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if here == 0 or others_have_state:
            for seed in range(3 if here == 0 else 1):
                step(model, optimizer, seed + here)
        if here == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[0]["initial_lr"] = 0.1
        else:
            optimizer.param_groups[0]["forgotten"] = 1
        return model, optimizer

    def body() -> None:
        model, optimizer = prepared(rank())
        group = optimizer.param_groups[0]
        before = copy.deepcopy(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert same_tree(dict(model.state_dict()), dict(before)), "parameters stay"
        assert optimizer.param_groups[0] is group
        expected = prepared(0)[1].state_dict()
        found = optimizer.state_dict()
        assert same_tree(found["state"], expected["state"])
        assert {k: repr(v) for k, v in found["param_groups"][0].items()} == {
            k: repr(v) for k, v in expected["param_groups"][0].items()
        }
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        step(model, optimizer, 9)  # it works on from there, as the root's does
        twin = prepared(0)
        step(*twin, 9)
        assert same_tree(dict(model.state_dict()), dict(twin[0].state_dict()))

    run_horovod(ranks, body)


def test_a_wrapped_optimizer_and_a_scheduler_see_the_roots_options() -> None:
    def body() -> list[float]:
        model = model_of(0)
        own = torch.optim.SGD(model.parameters(), lr=0.1 if rank() else 0.4, momentum=0.9)
        optimizer = DistributedOptimizer(own, named_parameters=model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        step(model, optimizer, rank())
        assert isinstance(optimizer.state[model[0].weight]["momentum_buffer"], torch.Tensor)
        if rank():
            optimizer.state.clear()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        scheduler.step()
        momentum = own.state[model[0].weight]["momentum_buffer"]
        assert momentum is optimizer.state[model[0].weight]["momentum_buffer"]
        return [own.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], momentum.sum().item()]

    first, second = run_horovod(2, body)
    assert first == second
    assert first[:2] == [0.2, 0.2]


def test_state_of_a_root_that_has_none_leaves_none() -> None:
    def body() -> int:
        model = model_of(rank())
        optimizer = torch.optim.Adam(model.parameters())
        if rank() == 0:
            step(model, optimizer, 0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return len(optimizer.state)

    assert run_horovod(2, body) == [0, 0]


@SIZES
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_is_trained_has_zeros_for_gradients_afterwards(ranks: int, is_wrapped: bool) -> None:
    """On every rank; a gradient that is there stays, and what is not trained has none."""

    def body() -> None:
        frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        trained = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]
        optimizer: Any = torch.optim.SGD([frozen, *trained], lr=0.1, momentum=0.9)
        if is_wrapped:
            optimizer = DistributedOptimizer(optimizer)
        trained[1].grad = torch.full((3,), 7.0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert frozen.grad is None
        assert trained[0].grad is not None
        assert torch.equal(trained[0].grad, torch.zeros(2, 2))
        assert trained[1].grad.tolist() == [7.0] * 3
        assert torch.equal(trained[0].detach(), torch.ones(2, 2))
        words = nn.Embedding(4, 2, sparse=True)
        sparse = torch.optim.SparseAdam(list(words.parameters()))
        hvd.broadcast_optimizer_state(sparse, root_rank=0)
        words(torch.tensor([1])).sum().backward()
        sparse.step()  # which refuses dense gradients

    run_horovod(ranks, body)


def test_state_of_several_groups_and_of_odd_kinds() -> None:
    """Precision of its own, numbers and nests in the state, entries of no parameter."""

    def prepared(here: int) -> torch.optim.Optimizer:
        ps = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))]
        optimizer = torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.2}], lr=0.1)
        if here == 0:
            optimizer.state[ps[0]] = {
                "master": torch.tensor([0.1, 0.2], dtype=torch.float64),
                "count": 3,
                "history": [torch.ones(1), (None, torch.zeros(2, 2))],
            }
            optimizer.state["global"] = {"k": torch.tensor(7)}
            optimizer.param_groups[1].update(tag="head", betas=(0.1, 0.2), momentum=0.9, odd=None)
        return optimizer

    def body() -> None:
        optimizer = prepared(rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert same_tree(optimizer.state_dict(), prepared(0).state_dict())

    run_horovod(2, body)


def test_lbfgs_is_refused() -> None:
    def body() -> None:
        optimizer = torch.optim.LBFGS(model_of(0).parameters())
        with pytest.raises(ValueError, match=r"torch.optim.LBFGS cannot be broadcast"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    run_horovod(1, body)


def test_an_optimizer_for_another_model_is_told_by_name() -> None:
    def body() -> None:
        model = nn.Linear(2, 3 + rank())
        optimizer = torch.optim.Adam(model.parameters())
        if rank() == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        else:
            found = r"weight has shape \(4, 2\) in this rank's optimizer and \(3, 2\) in rank 0's"
            with pytest.raises(UserError, match=found):
                hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
            assert not optimizer.state
        other = torch.optim.Adam([*model.parameters()][: 2 - rank()])
        if rank() == 0:
            hvd.broadcast_optimizer_state(other, root_rank=0)
        else:
            with pytest.raises(UserError, match=r"groups of \[1\] parameters, rank 0's of \[2\]"):
                hvd.broadcast_optimizer_state(other, root_rank=0)
        assert allreduce(torch.ones(1), op=Sum).item() == size()

    run_horovod(2, body)


def test_an_option_that_cannot_travel_is_told_to_all() -> None:
    def body() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.param_groups[0]["rule"] = len
        with pytest.raises(UserError, match=r"\.rule is a builtin_function"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    run_horovod(2, body)


# Objects


@dataclasses.dataclass
class Progress:
    epoch: int
    best: dict[str, float]


@SIZES
def test_an_object_goes_from_the_root_to_all(ranks: int) -> None:
    value = {"at": Progress(3, {"acc": 0.5}), 1: [torch.ones(2, dtype=torch.bfloat16), (None,)]}

    def body() -> list[Any]:
        is_root = rank() == ranks - 1
        mine = value if is_root else None  # in Horovod, this name differs from the root's
        arguments = Namespace(lr=0.1) if is_root else Namespace(lr=0.2, other=rank())
        send = hvd.broadcast_object_fn(ranks - 1, "fn")
        return [
            hvd.broadcast_object(mine, root_rank=ranks - 1),
            hvd.broadcast_object(arguments, ranks - 1, "arguments"),
            send("first" if is_root else ""),
            send("second" if is_root else ""),
            hvd.broadcast_object(rank(), ranks - 1),
        ]

    for found in run_horovod(ranks, body):
        assert found[0]["at"] == value["at"]
        assert same_tree(found[0][1], value[1])
        assert found[1:] == [Namespace(lr=0.1), "first", "second", ranks - 1]


@SIZES
def test_every_ranks_object_goes_to_all(ranks: int) -> None:
    def body() -> list[Any]:
        return hvd.allgather_object({"rank": rank(), "long": "x" * 1000 * rank()}, name="all")

    expected = [{"rank": r, "long": "x" * 1000 * r} for r in range(ranks)]
    assert run_horovod(ranks, body) == [expected] * ranks


def test_objects_of_some_ranks() -> None:
    def body() -> tuple[Any, Any]:
        some = add_process_set(ProcessSet([0, 2]))
        if not some.included():
            return None, None
        return (
            hvd.broadcast_object(f"from {rank()}", 2, process_set=some),
            hvd.allgather_object(rank(), process_set=some),
        )

    here = ("from 2", [0, 2])
    assert run_horovod(3, body) == [here, (None, None), here]


@SIZES
def test_an_object_that_cannot_travel_is_told_to_all_and_the_job_goes_on(ranks: int) -> None:
    root = ranks - 1

    def body() -> int:
        value = {"f": [len]} if rank() == root else 1
        sender = "" if rank() == root else f"rank {root} could not send its object: "
        message = rf"{sender}f\.0 is a builtin_function"
        with pytest.raises(UserError, match=message):
            hvd.broadcast_object(value, root)
        with pytest.raises(UserError, match=message):
            hvd.allgather_object(value)
        return hvd.broadcast_object(7, root)

    assert run_horovod(ranks, body) == [7] * ranks

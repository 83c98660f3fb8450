"""All ranks start from rank 0's model and optimizer, models that cannot are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from farandole.errors import ModelMismatchError, UserError
from farandole.sync import InStep
from farandole.testing import run_world
from farandole.train import Run


def model_of(rank: int) -> nn.Module:
    """The same kind of model on every rank, with weights of the rank's own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 5)
    return model


def test_parameters_and_buffers_come_from_rank_0(tmp_path: Path) -> None:
    def body(run: Run) -> dict[str, torch.Tensor]:
        model = model_of(run.rank)
        wrapped = run.distribute(model)
        assert run.unwrap(wrapped) is model
        assert run.check_in_step(wrapped)
        return model.state_dict()

    expected = model_of(0).state_dict()
    for state in run_world(3, body, folder=tmp_path):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def _models_that_differ() -> dict[str, tuple[Callable[[int], nn.Module], list[str]]]:
    def shape(rank: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 if rank == 2 else 2))

    def dtype(rank: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model.double() if rank == 1 else model

    def more(rank: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 + (rank == 1))))

    def fewer(rank: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=rank != 1))

    def buffer(rank: int) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(rank + 1))
        return model

    def frozen(rank: int) -> nn.Module:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(rank != 2)
        return model

    def order(rank: int) -> nn.Module:
        names = ["first", "second"] if rank != 1 else ["second", "first"]
        return nn.ModuleDict([(name, nn.Linear(2, 2)) for name in names])

    return {
        "shape": (shape, ["'1.weight'", "(2, 4) float32 on rank 0", "(5, 4) float32 on rank 2"]),
        "dtype": (dtype, ["'0.weight'", "(4, 3) float32 on rank 0", "(4, 3) float64 on rank 1"]),
        "more": (more, ["'2.weight'", "missing on rank 0", "(3, 3) float32 on rank 1"]),
        "fewer": (fewer, ["'1.bias'", "(3,) float32 on rank 0", "missing on rank 1"]),
        "buffer": (buffer, ["'seen'", "(1,) float32 on rank 0", "(2,) float32 on rank 1"]),
        "frozen": (frozen, ["'bias'", "trained on rank 0", "frozen on rank 2"]),
        "order": (order, ["rank 1", "another order"]),
    }


@pytest.mark.parametrize("case", _models_that_differ())
def test_models_that_differ_are_refused_on_every_rank(tmp_path: Path, case: str) -> None:
    make, expected = _models_that_differ()[case]

    def body(run: Run) -> str:
        with pytest.raises(ModelMismatchError) as caught:
            run.distribute(make(run.rank))
        run.group.barrier()  # nobody is left behind in a collective
        return str(caught.value)

    for message in run_world(3, body, folder=tmp_path):
        for part in expected:
            assert part in message


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1, betas=(0.8, 0.9), amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1, weight_decay=0.3),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, 0.1, max_iter=3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1, centered=True),
}


def practised(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """A few steps, so that the optimizer has a state."""

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(4, 3)).square().sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_comes_from_rank_0(tmp_path: Path, kind: str) -> None:
    """Even where another rank has taken other steps before, or none."""

    def body(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        model = model_of(run.rank)[:1]
        optimizer = OPTIMIZERS[kind](model.parameters())
        if run.rank != 2:
            practised(model, optimizer, steps=3 - run.rank)
        optimizer.param_groups[0]["lr"] = 0.5 + run.rank
        before = _copied(optimizer.state_dict())
        run.distribute(model, optimizer)
        return before, optimizer.state_dict()

    results = run_world(3, body, folder=tmp_path)
    expected = results[0][0]
    assert expected["state"]
    for _, state in results:
        assert same(state["state"], expected["state"])
        assert state["param_groups"][0]["lr"] == 0.5
        assert same(state["param_groups"], expected["param_groups"])


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(value) for value in tree)
    return tree


def test_each_group_of_parameters_gets_rank_0_s_options(tmp_path: Path) -> None:
    def body(run: Run) -> list[dict[str, Any]]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [
            {"params": layer.parameters(), "lr": 0.1 * (n + 1) + run.rank, "name": f"layer {n}"}
            for n, layer in enumerate(model)
        ]
        betas = (0.9 - 0.1 * run.rank, 0.99)
        optimizer = torch.optim.Adam(groups, betas=betas, amsgrad=run.rank == 0)
        run.distribute(model, optimizer)
        return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    first, second = run_world(2, body, folder=tmp_path)
    assert [group["lr"] for group in first] == [0.1, 0.2]
    assert first == second
    assert second[0]["betas"] == (0.9, 0.99)  # still a tuple


def test_an_optimizer_goes_on_working_after_it_was_spread(tmp_path: Path) -> None:
    def body(run: Run) -> bool:
        model = model_of(run.rank)[:1]
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        practised(model, optimizer, steps=run.rank)
        wrapped, optimizer = run.distribute(model, optimizer)
        practised(wrapped, optimizer, steps=3)
        return bool(run.check_in_step(wrapped))

    assert run_world(2, body, folder=tmp_path) == [True, True]


def test_check_in_step_names_the_tensor_and_the_rank(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[InStep, InStep, InStep]:
        model = model_of(0)
        wrapped = run.distribute(model)
        before = run.check_in_step(wrapped)
        if run.rank == 1:
            with torch.no_grad():  # one bit of one weight
                model[2].weight.view(torch.int32)[1, 1] ^= 1
        changed = run.check_in_step(wrapped)
        return before, changed, run.check_in_step(model)

    for before, changed, plain in run_world(3, body, folder=tmp_path):
        assert before
        assert str(before) == "all ranks hold the same bytes"
        assert not changed
        assert changed.differing == (("2.weight", (1,)),)
        assert str(changed) == "differs from rank 0: 2.weight (ranks [1])"
        assert plain == changed


def test_check_in_step_takes_every_kind_of_tensor(tmp_path: Path) -> None:
    def body(run: Run) -> list[str]:
        model = nn.Module()
        for name, value in {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(1.5),
            "mask": torch.tensor([True, run.rank == 0]),
            "count": torch.tensor(7),
            "narrow": torch.tensor([1.0, float(run.rank)], dtype=torch.bfloat16),
            "turned": torch.arange(6.0).view(2, 3).t(),
            "nan": torch.tensor([float("nan")]),
            "zero": torch.tensor([-0.0 if run.rank else 0.0]),
        }.items():
            model.register_buffer(name, value)
        return [name for name, _ in run.check_in_step(model).differing]

    assert run_world(2, body, folder=tmp_path) == [["mask", "narrow", "zero"]] * 2


def test_a_model_without_tensors_is_in_step(tmp_path: Path) -> None:
    assert run_world(2, lambda run: bool(run.check_in_step(nn.ReLU())), folder=tmp_path) == [
        True,
        True,
    ]


def test_long_differences_are_shortened() -> None:
    shown = str(InStep(tuple((f"layer{n}", (1, 2)) for n in range(8))))
    assert "layer4 (ranks [1, 2])" in shown
    assert "layer5" not in shown
    assert shown.endswith("and 3 more")


def test_a_model_is_distributed_once(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model = nn.Linear(2, 2)
        wrapped = run.distribute(model)
        for again in (model, wrapped):
            with pytest.raises(UserError, match="distributed already"):
                run.distribute(again)
        with pytest.raises(UserError, match=r"not given to run\.distribute"):
            run.unwrap(nn.Linear(2, 2))
        with pytest.raises(UserError, match=r"not given to run\.distribute"):
            run.no_sync(nn.Linear(2, 2))

    run_world(2, body, folder=tmp_path)


def test_a_lazy_model_is_refused_by_name(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        with pytest.raises(UserError, match=r"'0\.weight' has no shape yet.*Pass a batch"):
            run.distribute(nn.Sequential(nn.LazyLinear(3)))

    run_world(2, body, folder=tmp_path)


def test_a_model_with_nothing_to_train(tmp_path: Path) -> None:
    def body(run: Run) -> dict[str, torch.Tensor]:
        model = run.distribute(model_of(run.rank).requires_grad_(False))
        with run.no_sync(model):
            model.eval()(torch.ones(1, 3))
        return run.unwrap(model).state_dict()

    first, second = run_world(2, body, folder=tmp_path)
    assert same(first, second)

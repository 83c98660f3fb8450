"""A checkpoint of another optimizer, or of one with other groups, is refused with both names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim
from torch.optim import Optimizer

from farandole.errors import CheckpointError
from farandole.sync import Strategy, parse
from farandole.sync.server.table import OptimizerState
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.optimizer_state import (
    merged,
    names_of,
    numbered_state,
    state_by_name,
)
from farandole.train.checkpoint.same_optimizer import OtherOptimizer, kind_of, require_same_kind

MakeOptimizer = Callable[[nn.Module], Optimizer]


def make(kind: type[Any], **options: Any) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), lr=0.01, **options)


def in_two_groups(model: nn.Module) -> Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def first_layer(model: nn.Module) -> Optimizer:
    return optim.AdamW(model[0].parameters(), lr=0.01)  # type: ignore[index]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(wrapped: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def save(folder: Path, made: MakeOptimizer, sync: Strategy | None = None) -> None:
    def body(run: Run) -> None:
        model = net()
        step(*run.distribute(model, made(model)))
        run.save()

    run_world(2, body, folder=folder, sync=sync)


def load(folder: Path, made: MakeOptimizer, sync: Strategy | None = None) -> None:
    def body(run: Run) -> None:
        model = net()
        wrapped, optimizer = run.distribute(model, made(model))
        run.load()
        step(wrapped, optimizer)

    run_world(2, body, folder=folder, sync=sync)


class Own(optim.SGD):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("before", "now", "names"),
    [
        (make(optim.SGD, momentum=0.9), make(optim.AdamW), "SGD AdamW"),
        (make(optim.SGD), make(optim.Adam), "SGD Adam"),
        (make(optim.Adam), make(optim.AdamW), "Adam AdamW"),
        (make(optim.AdamW), make(optim.SGD, momentum=0.9), "AdamW SGD"),
        (make(optim.RMSprop), make(optim.Adagrad), "RMSprop Adagrad"),
    ],
)
def test_both_are_named(
    before: MakeOptimizer, now: MakeOptimizer, names: str, tmp_path: Path
) -> None:
    save(tmp_path, before)
    saved, present = names.split()
    message = (
        rf"saved with torch\.optim\.{saved}, and this script has torch\.optim\.{present};"
        rf".*Go on with torch\.optim\.{saved}\. .*model-0\.safetensors"
    )
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, now)


def test_what_the_error_says_keeps_the_weights(tmp_path: Path) -> None:
    save(tmp_path, make(optim.SGD))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, make(optim.AdamW))
    (path,) = re.findall(r"with (\S+model-0\.safetensors)", str(error.value))
    model = net()
    model.load_state_dict(load_file(path))


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (make(optim.AdamW), in_two_groups, r"'0\.weight' and '0\.bias' were in one group.*in two"),
        (
            in_two_groups,
            make(optim.AdamW),
            r"'0\.weight' and '0\.bias' were in two groups.* in 1\.",
        ),
        (first_layer, make(optim.AdamW), r"'2\.weight' is trained now.*2 parameters in 1 .* 4 in"),
        (
            make(optim.AdamW),
            first_layer,
            r"'2\.weight' was trained when.*4 parameters in 1 .* 2 in",
        ),
    ],
)
def test_groups_that_changed(
    before: MakeOptimizer, now: MakeOptimizer, message: str, tmp_path: Path
) -> None:
    save(tmp_path, before)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, now)


@pytest.mark.parametrize("made", [make(Own, momentum=0.9), in_two_groups])
def test_the_same_goes_on(made: MakeOptimizer, tmp_path: Path) -> None:
    save(tmp_path, made)
    load(tmp_path, made)


def forgets_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints were before they named the optimizer."""
    write = checkpoint.write_parts

    def older(temporary: Path, parts: dict[str, Any]) -> checkpoint.Entry:
        for name, part in parts.items():
            if name.startswith("optimizer-"):
                del part["kind"]
        return write(temporary, parts)

    monkeypatch.setattr(checkpoint, "write_parts", older)


@pytest.mark.parametrize("made", [make(optim.SGD, momentum=0.9), make(optim.AdamW), in_two_groups])
def test_an_older_checkpoint_goes_on(
    made: MakeOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets_the_kind(monkeypatch)
    save(tmp_path, made)
    load(tmp_path, made)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            make(optim.SGD, momentum=0.9),
            make(optim.AdamW),
            r"another optimizer, whose groups have dampening.*momentum.*torch\.optim\.AdamW has",
        ),
        (make(optim.Adam), make(optim.SGD), r"have amsgrad, betas.*torch\.optim\.SGD has"),
        (make(optim.Adam), make(optim.AdamW), r"have decoupled_weight_decay=False"),
    ],
)
def test_an_older_checkpoint_of_another_optimizer(
    before: MakeOptimizer,
    now: MakeOptimizer,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgets_the_kind(monkeypatch)
    save(tmp_path, before)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, now)


def test_another_version_of_torch_is_the_same_optimizer() -> None:
    """It may know more options, or fewer; schedulers add some, and a class may have moved."""
    optimizer = make(optim.Adam)(net())
    saved = state_by_name(optimizer, {})
    (group,) = saved["groups"]
    assert saved["kind"] == "torch.optim.Adam"
    require_same_kind(optimizer, {"groups": [{**group, "option_of_later": 1, "initial_lr": 0.1}]})
    require_same_kind(optimizer, {"groups": [{"lr": 0.1, "betas": (0.9, 0.99), "names": []}]})
    require_same_kind(optimizer, {**saved, "kind": "elsewhere.Adam"})
    with pytest.raises(OtherOptimizer, match=r"saved with elsewhere\.Adam, whose groups have beta"):
        require_same_kind(
            optimizer, {"kind": "elsewhere.Adam", "groups": [{"lr": 0.1, "beta": 0.9}]}
        )
    assert kind_of(Own(net().parameters(), lr=1)).endswith("test_resume_optimizer.Own")


def load_by_name(
    optimizer: torch.optim.Optimizer, saved: Any, names: dict[int, str], *, whole: bool
) -> None:
    optimizer.load_state_dict(numbered_state(optimizer, saved, names, whole=whole))


def test_stages_save_groups_apart() -> None:
    """One group of the whole model was one in each stage, and what no stage uses in none."""
    model = net()
    parts = [
        state_by_name(optim.AdamW(model[place].parameters(), lr=rate), names_of(model))  # type: ignore[index]
        for place, rate in ((0, 0.5), (2, 0.5))
    ]
    whole = make(optim.AdamW)(model)
    load_by_name(whole, merged(parts), names_of(model), whole=True)
    assert whole.param_groups[0]["lr"] == 0.5
    load_by_name(whole, merged(parts[:1]), names_of(model), whole=True)
    with pytest.raises(OtherOptimizer, match=r"'2\.weight' is trained now"):
        load_by_name(whole, merged(parts[:1]), names_of(model), whole=False)
    apart = in_two_groups(model)
    with pytest.raises(OtherOptimizer, match="were in one group"):
        load_by_name(apart, merged(parts), names_of(model), whole=True)
    in_groups = merged([state_by_name(apart, names_of(model))])
    with pytest.raises(OtherOptimizer, match="were in two groups"):
        load_by_name(whole, in_groups, names_of(model), whole=True)


@pytest.mark.parametrize(
    ("sync", "before", "now", "message"),
    [
        ("server", make(optim.SGD), make(optim.AdamW), r"torch\.optim\.SGD, and this script has"),
        (
            "server",
            make(optim.SGD, momentum=0.9),
            make(optim.SGD),
            r"rule was 'sgd:momentum=0\.9' with 1 states, and is 'sgd' with 0 now",
        ),
        (
            "downpour",
            make(optim.SGD),
            make(optim.SGD, weight_decay=0.5),
            r"rule was 'adagrad' with 1 states, and is 'adagrad:weight_decay=0\.5'",
        ),
    ],
)
def test_the_servers_rule_must_be_the_same(
    sync: str, before: MakeOptimizer, now: MakeOptimizer, message: str, tmp_path: Path
) -> None:
    save(tmp_path, before, parse(sync))
    load(tmp_path, before, parse(sync))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, now, parse(sync))


@pytest.mark.parametrize(
    ("rule", "saved", "message"),
    [
        ("sgd:momentum=0.9", [{"slots": [1]}], None),
        ("adamw", [{"slots": [1]}], "was 'another one' with 1 states, and is 'adamw' with 2 now"),
        ("sgd", [], "held 0 tables, and hold 1 now"),
    ],
)
def test_servers_states_from_before_rules_were_noted(
    rule: str, saved: list[dict[str, Any]], message: str | None
) -> None:
    store: Any = SimpleNamespace(table=lambda name: SimpleNamespace(rule=rule))
    part: Any = SimpleNamespace(name="model")
    problem = OptimizerState(store, [part]).problem_with(saved)
    assert problem is None if message is None else message in str(problem)

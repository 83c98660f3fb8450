"""What a stage must get right beside gradients: random numbers, statistics, precision, clipping,
odd models; and what goes wrong is said, by all ranks."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole import Layout, UserError
from farandole.errors import StageError
from farandole.layout import parse_layout
from farandole.layout.pipeline.deferred import DeferredBatchNorm, commit_statistics
from farandole.sync import parse
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.models import (
    Batch,
    assert_close,
    assert_same,
    draw_one_at_a_time,
    drawn,
    dropping,
    in_stages,
    normal,
    plainly,
    sgd,
    task,
    tensors_of,
    trained_in_stages,
)

FOUR_MICROBATCHES = (
    "stages=2,microbatches=4",
    "stages=3,microbatches=4,schedule=gpipe",
    "stages=3,microbatches=4,schedule=gems",
    "stages=4,microbatches=4,schedule=interleaved",
    "stages=3,microbatches=4,schedule=zero-bubble",
    "stages=2,microbatches=4,bidirectional",
    "stages=2,microbatches=4,replicas=2+1",
    "stages=2,microbatches=4,recompute",
)


def batches_of(rows: Sequence[int], inputs: Any = None, outputs: int = 3) -> list[Batch]:
    given = inputs or normal(4)
    generator = torch.Generator().manual_seed(1)
    return [(given(count, generator), normal(outputs)(count, generator)) for count in rows]


def still(weights: Any) -> torch.optim.Optimizer:
    """Nothing moves, so that what else changes can be compared over several steps."""
    return torch.optim.SGD(weights, 0.0)


# Random numbers


def test_dropout_is_the_same_however_the_model_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_one_at_a_time(monkeypatch)
    batches = batches_of([8, 7, 8])
    (expected,) = trained_in_stages(
        parse_layout("stages=1,microbatches=4"), dropping(), batches, F.mse_loss, tmp_path
    )
    undropped = plainly(dropping().eval(), batches, F.mse_loss)
    assert abs(undropped.losses[0] - expected.losses[0]) > 1e-3
    for text in FOUR_MICROBATCHES:
        found = trained_in_stages(parse_layout(text), dropping(), batches, F.mse_loss, tmp_path)
        assert_same(found, expected)


def test_dropout_is_another_in_every_step_and_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_one_at_a_time(monkeypatch)
    row = batches_of([1])[0]
    twice = tuple(torch.cat([part, part]) for part in row)
    seen: list[float] = []

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        value = F.mse_loss(found, wanted)
        seen.append(value.item())
        return value

    layout = parse_layout("stages=2,microbatches=2")
    trained_in_stages(layout, dropping(), [twice, twice], loss, tmp_path, still, check=False)
    assert len(set(seen)) == 4


def test_the_script_s_own_random_numbers_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_one_at_a_time(monkeypatch)
    layout = parse_layout("stages=2,microbatches=2,recompute")
    model, batches = dropping(), batches_of([4])
    before = torch.get_rng_state()
    trained_in_stages(layout, model, batches, F.mse_loss, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


# BatchNorm


def normalised(momentum: float | None = 0.1) -> nn.Module:
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Tanh(), nn.Linear(5, 3)]
    return drawn(nn.Sequential(*layers))


@pytest.mark.parametrize("batchnorm", ["micro", "deferred"])
def test_statistics_do_not_notice_that_activations_are_computed_again(
    batchnorm: str, tmp_path: Path
) -> None:
    batches = batches_of([6, 7, 6])
    layout = parse_layout(f"stages=2,microbatches=3,balance=2+2,batchnorm={batchnorm}")
    again = dataclasses.replace(layout, recompute=True)
    kept = trained_in_stages(layout, normalised(), batches, F.mse_loss, tmp_path)
    recomputed = trained_in_stages(again, normalised(), batches, F.mse_loss, tmp_path)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(kept[0].weights[name], recomputed[0].weights[name])
    counted = int(kept[0].weights["1.num_batches_tracked"])
    assert counted == (9 if batchnorm == "micro" else 3)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "text",
    [
        "stages=3,microbatches=3,balance=1+1+2",
        "stages=2,microbatches=4,balance=1+3,recompute",
        "stages=2,microbatches=4,balance=1+3,schedule=gems",
        "stages=2,microbatches=3,balance=1+3,replicas=1+2",
        "stages=2,microbatches=3,balance=1+3,schedule=2bw",
    ],
)
def test_deferred_statistics_are_those_of_whole_batches(
    text: str, momentum: float | None, tmp_path: Path
) -> None:
    """Weights stand still, so that every batch reaches BatchNorm as it would without a pipeline."""
    batches = batches_of([8, 9, 11])
    expected = plainly(normalised(momentum), batches, F.mse_loss, still)
    layout = parse_layout(f"{text},batchnorm=deferred")
    found = trained_in_stages(layout, normalised(momentum), batches, F.mse_loss, tmp_path, still)
    holders = [outcome for outcome in found if "1.running_mean" in outcome.weights]
    assert len(holders) == (2 if "gems" in text or "replicas" in text else 1)
    for outcome in holders:
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert_close(outcome.weights[name], expected.weights[name], name)
        assert_close(outcome.prediction, expected.prediction, "prediction")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_deferred_statistics_of_large_values(dtype: torch.dtype) -> None:
    norm = DeferredBatchNorm(nn.BatchNorm2d(3, momentum=1.0))
    generator = torch.Generator().manual_seed(0)
    x = (1000 + 10 * torch.randn(4, 3, 5, 5, generator=generator)).to(dtype)
    for part in x.split(2):
        norm(part)
    commit_statistics(nn.Sequential(norm))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    dims = (0, 2, 3)
    torch.testing.assert_close(norm.running_mean, x.double().mean(dims).float())
    torch.testing.assert_close(norm.running_var, x.double().var(dims).float(), rtol=1e-5, atol=0)


# Precision


def singly(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).float()


def in_single(batches: Sequence[Batch]) -> list[Batch]:
    return [(x.float(), y.float()) for x, y in batches]


@pytest.mark.parametrize(
    "text", ["microbatches=2,recompute", "microbatches=2,schedule=zero-bubble"]
)
def test_bfloat16_is_autocast_with_the_same_micro_batches(text: str, tmp_path: Path) -> None:
    model, batches = singly(task("mlp").model), in_single(batches_of([6, 8, 4]))
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        total = 0.0
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(plain(x[half]), y[half])
            (loss / 2).backward()
            total += loss.item() / 2
        optimizer.step()
        losses.append(total)
    exact = plainly(model, batches, F.mse_loss)
    found = trained_in_stages(
        parse_layout(f"stages=3,{text}"),
        model,
        batches,
        F.mse_loss,
        tmp_path,
        precision=torch.bfloat16,
    )
    for outcome in found:
        torch.testing.assert_close(outcome.losses, losses, rtol=1e-6, atol=0)
        for name, weight in outcome.weights.items():
            torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=1e-7)
        assert outcome.prediction.dtype == torch.bfloat16
    assert abs(exact.losses[0] - losses[0]) > 1e-5, "bfloat16 is not exact"


class Fuse(nn.Module):
    """The first number of a row is for `Steep`, the others for the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x[:, 1:]), x[:, :1]


class Steep(nn.Module):
    """Its bias is zero, and does nothing but to have a gradient as large as one wants."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0].float() + self.bias * value[1]


def test_a_gradient_that_overflows_on_one_stage_makes_all_skip_the_step(tmp_path: Path) -> None:
    model = nn.Sequential(Fuse(), Steep())
    x, y = torch.ones(4, 4), torch.zeros(4, 3)
    steep = x.clone()
    steep[1, 0] = 3e38

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        states = [tensors_of(model)]
        for inputs in (x, steep, x):
            trainer.step(inputs, y)
            states.append(tensors_of(model))
        return [
            any(not torch.equal(value, after[name]) for name, value in before.items())
            for before, after in pairwise(states)
        ], trainer._session.models.synchronizers[0].state_dict()["pipeline"]["scale"]["value"]

    found = in_stages(
        "stages=2,microbatches=2",
        model,
        body,
        F.mse_loss,
        tmp_path,
        precision=torch.float16,
    )
    assert found == [([True, False, True], 2.0**15)] * 2


# Clipping


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tied", "stages=3,microbatches=2"),
        ("tied", "stages=4,microbatches=2,schedule=gems"),
        ("tied", "stages=3,microbatches=4,replicas=2+1+2"),
        ("tied crosswise", "stages=4,microbatches=3,schedule=interleaved"),
        ("mlp", "stages=3,microbatches=2,bidirectional"),
    ],
)
def test_the_norm_counts_every_weight_once(name: str, text: str, tmp_path: Path) -> None:
    made = task(name)
    batches = made.batches([5, 4])
    expected = plainly(made.model, batches, made.loss, clip=0.01)
    clipped = [gradient.square().sum() for gradient in expected.gradients[0].values()]
    assert abs(torch.stack(clipped).sum().sqrt() - 0.01) < 1e-5
    found = trained_in_stages(
        parse_layout(text), made.model, batches, made.loss, tmp_path, clip=0.01
    )
    assert_same(found, expected)


# Odd models and inputs


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems"])
@pytest.mark.parametrize(
    "layers",
    [
        (nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)),
        (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
        (nn.Linear(4, 4), nn.Linear(4, 3), nn.Tanh()),
    ],
    ids=["first", "middle", "last"],
)
def test_a_stage_without_parameters(
    layers: tuple[nn.Module, ...], schedule: str, tmp_path: Path
) -> None:
    model, batches = drawn(nn.Sequential(*layers)), batches_of([4, 3])
    layout = parse_layout(f"stages=3,microbatches=2,schedule={schedule}")
    found = trained_in_stages(layout, model, batches, F.mse_loss, tmp_path)
    assert_same(found, plainly(model, batches, F.mse_loss))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems"])
@pytest.mark.parametrize("frozen", [(0,), (2,), (4,), (0, 2)])
def test_frozen_layers(frozen: tuple[int, ...], schedule: str, tmp_path: Path) -> None:
    made = task("mlp")
    for index in frozen:
        made.model[index].requires_grad_(False)  # type: ignore[index]
    batches = made.batches([4, 3])
    layout = parse_layout(f"stages=3,microbatches=2,schedule={schedule},balance=2+2+1")
    found = trained_in_stages(layout, made.model, batches, made.loss, tmp_path)
    assert_same(found, plainly(made.model, batches, made.loss))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self.layer(value["x"]) * value["factor"], value["pair"][1]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, value: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"out": self.layer(value[0] + value[1]), "rows": value[1].sum(1)}


def test_inputs_targets_and_outputs_may_be_nests(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)

    def inputs(rows: int, _: torch.Generator) -> Any:
        x, y, z = (normal(4)(rows, generator) for _ in range(3))
        return ({"x": x, "pair": (y, z), "factor": 0.5},)  # one argument, a dictionary

    def loss(found: dict[str, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(found["out"], wanted[0]) + found["rows"].mean() * wanted[1].mean()

    batches = [(x, (y, y[:, 0])) for x, y in batches_of([5, 3, 4], inputs)]
    # The product of two means is no mean over rows, so it goes with one micro-batch only.
    model = drawn(nn.Sequential(Named(), Both()))
    for text in ("stages=2,schedule=layer", "stages=2,schedule=zero-bubble"):
        found = trained_in_stages(parse_layout(text), model, batches, loss, tmp_path)
        assert_same(found, plainly(model, batches, loss))


def test_predictions_keep_their_nest_over_micro_batches(tmp_path: Path) -> None:
    (x, _), *_ = batches_of([7])
    model = drawn(nn.Sequential(nn.Linear(4, 4), Pair()))

    def body(run: Run, trainer: Trainer, _: nn.Module) -> Any:
        return trainer.predict(x)

    expected = model(x)
    for found in in_stages("stages=2,microbatches=3", model, body, F.mse_loss, tmp_path):
        assert_close(found["values"], expected["values"])
        assert torch.equal(found["large"], expected["large"])
        assert found["name"] == "pair"


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"values": x * 2, "large": x.sum(1) > 0, "name": "pair"}


# What goes wrong


class Failing(nn.Module):
    def __init__(self, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when(x):
            raise ZeroDivisionError("it is too small")
        return self.layer(x)


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), {1, 2}


class First(nn.Module):
    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return value[0]


def said_by_all(
    layout: str,
    model: nn.Module,
    folder: Path,
    loss: Any = F.mse_loss,
    *,
    size: int | None = None,
    steps: int = 1,
) -> list[list[str]]:
    """For every rank, what each of its steps said; rows of 4, the last one below -5."""
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    x[-1] = -10

    def body(run: Run, trainer: Trainer, _: nn.Module) -> list[str]:
        said = []
        for _step in range(steps):
            try:
                trainer.step(x, y)
            except StageError as error:
                said.append(str(error))
            else:
                said.append("")
        return said

    return in_stages(layout, model, body, loss, folder, size=size)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "gems", "bidirectional"])
def test_a_block_that_raises_is_named_by_all_ranks_and_in_the_next_step_too(
    schedule: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing(lambda x: True), nn.Linear(4, 4))
    name = schedule if schedule == "bidirectional" else f"schedule={schedule}"
    found = said_by_all(f"stages=3,microbatches=4,{name}", model, tmp_path, steps=2)
    reason = (
        "stage 1 on rank 1, in the forward of micro-batch 0: ZeroDivisionError: it is too small"
    )
    again = f"the pipeline was broken by an earlier failure: {reason}"
    assert found == [[reason, again]] * 3


def test_a_failure_in_the_backward_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Backfiring())
    found = said_by_all("stages=3,microbatches=2", model, tmp_path)
    assert found == [["stage 2 on rank 2, in the backward of micro-batch 0: OverflowError: no"]] * 3


class Backfiring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result = x * 2
        result.register_hook(self._refuse)
        return result

    def _refuse(self, gradient: Tensor) -> Tensor:
        raise OverflowError("no")


def test_the_rank_that_is_named_is_the_job_s_not_the_pipeline_s(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing(lambda x: True))
    found = said_by_all("stages=2,microbatches=2", model, tmp_path, size=4)
    assert [rank[0].split(",")[0] for rank in found] == [
        "stage 1 on rank 1",
        "stage 1 on rank 1",
        "stage 1 on rank 3",
        "stage 1 on rank 3",
    ]


def test_what_cannot_travel_is_named_by_all_ranks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stubborn(), First())
    found = said_by_all("stages=3,microbatches=2", model, tmp_path)
    (reason,) = found[0]
    assert found == [[reason]] * 3
    assert reason.startswith("stage 1 on rank 1, in the forward of micro-batch 0: ")
    assert "set cannot travel between stages" in reason


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda found, wanted: (found - wanted).square().mean(1), r"\(2,\)"),
        (lambda found, wanted: 1.0, "float"),
    ],
)
def test_a_loss_that_is_no_single_number(loss: Any, told: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = said_by_all("stages=2,microbatches=2", model, tmp_path, loss)
    for (reason,) in found:
        assert reason.startswith(
            "stage 1 on rank 1, in the forward of micro-batch 0: the loss must"
        )
        assert reason.endswith(f"one element, not {told.replace(chr(92), '')}.")


def refused(
    layout: str | None,
    folder: Path,
    *,
    size: int,
    model: nn.Module | None = None,
    **options: Any,
) -> str:
    """What all ranks say to a trainer that cannot be."""

    def body(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            run.trainer(
                copy.deepcopy(model or task("mlp").model), F.mse_loss, sgd, layout=layout, **options
            )
        return str(caught.value)

    (said,) = set(run_world(size, body, folder=folder))
    return said


def test_more_stages_than_blocks(tmp_path: Path) -> None:
    assert refused("stages=6", tmp_path, size=6) == (
        "layout: stages=6, and the model has 5 blocks: 0, 1, 2, 3, 4. Take at most 5 stages."
    )


def test_a_balance_that_does_not_add_up(tmp_path: Path) -> None:
    said = refused("stages=2,balance=2+2", tmp_path, size=2)
    assert "2+2" in said
    assert "5" in said


def test_a_memory_limit_that_cannot_be_met_says_by_how_much(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # of 1 MiB each
    limit = 2**-9  # 2 MiB: with gradients and an optimizer's state it takes three times as much
    text = f"stages=2,memory_gib={limit}"
    said = refused(text, tmp_path, size=2, model=model, sample=torch.zeros(4, 512))
    needed, excess = map(float, re.findall(r"needs ([\d.]+) MiB.*: ([\d.]+) MiB too much", said)[0])
    assert needed >= 6
    assert abs(needed - 2 - excess) < 0.11
    assert "needs measurements" in refused("stages=2,memory_gib=1", tmp_path, size=2)
    assert "needs measurements" in refused("stages=auto", tmp_path, size=2)


def test_workers_that_do_not_make_whole_replicas(tmp_path: Path) -> None:
    said = refused("stages=2,microbatches=2", tmp_path, size=3)
    assert "one replica takes 2 workers, and 3 is no multiple" in said


@pytest.mark.parametrize("text", ["hogwild", "server", "downpour"])
def test_strategies_with_one_model_for_all_are_refused(text: str, tmp_path: Path) -> None:
    said = refused("stages=2", tmp_path, size=2, sync=parse(text))
    assert "keeps one whole model for all workers" in said


def test_clipping_a_stream_is_refused(tmp_path: Path) -> None:
    said = refused("stages=2,schedule=pipedream", tmp_path, size=2, clip=1.0)
    assert said.startswith("clip=1 needs the gradients of all stages at once")


def test_tied_weights_in_a_stream_are_refused(tmp_path: Path) -> None:
    said = refused("stages=2,schedule=pipedream", tmp_path, size=2, model=task("tied").model)
    assert "'0.weight' belongs to stages (0, 1)" in said


def test_distribute_is_refused_under_a_layout(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        run._session.settings = dataclasses.replace(run.settings, layout=Layout(stages=2))
        with pytest.raises(UserError, match=r"run\.trainer"):
            run.distribute(nn.Linear(2, 2))

    run_world(2, body, folder=tmp_path)


def test_a_batch_whose_tensors_disagree_about_its_rows(tmp_path: Path) -> None:
    def body(run: Run, trainer: Trainer, _: nn.Module) -> None:
        with pytest.raises(UserError, match=r"have 3 in inputs, 2 in targets\."):
            trainer.step(torch.ones(3, 4), torch.ones(2, 3))

    in_stages("stages=2,microbatches=2", task("mlp").model, body, F.mse_loss, tmp_path)


def test_a_second_model_is_refused(tmp_path: Path) -> None:
    def body(run: Run, trainer: Trainer, _: nn.Module) -> None:
        with pytest.raises(UserError, match="has another already"):
            run.trainer(nn.Linear(2, 2), F.mse_loss, sgd, layout="stages=2")

    in_stages("stages=2", task("mlp").model, body, F.mse_loss, tmp_path)

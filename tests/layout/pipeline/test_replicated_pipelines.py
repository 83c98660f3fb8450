"""Replicas that are pipelines themselves: every strategy of the project keeps them in step.

rank 0 ─▶ rank 1      one replica, the first stage and the last
rank 2 ─▶ rank 3      the other; ranks 0 and 2 meet through the strategy, and so do 1 and 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from farandole.errors import UserError
from farandole.layout import parse_layout
from farandole.sync import parse
from farandole.topology import Topology
from farandole.train import Run
from farandole.train.run_metrics import RunMetrics
from farandole.train.trainer import Trainer
from tests.layout.models import (
    MakeOptimizer,
    Task,
    adamw,
    assert_close,
    assert_weights,
    drawn,
    in_stages,
    sgd,
    task,
    tensors_of,
)

EPOCHS, BATCH = 2, 8
TWO_STAGES = "stages=2,microbatches=3"


def samples(made: Task, count: int) -> TensorDataset:
    (x, y), *_ = made.batches([count], seed=4)
    return TensorDataset(x, y)


def trained(
    layout: str | None,
    made: Task,
    source: TensorDataset,
    folder: Path,
    make_optimizer: MakeOptimizer = sgd,
    *,
    epochs: int = EPOCHS,
    **options: Any,
) -> list[dict[str, Any]]:
    """By rank: its losses, its weights, what it decided, and whether it is in step."""

    def body(run: Run, trainer: Trainer, model: nn.Module) -> dict[str, Any]:
        losses, in_step = [], []
        for _ in run.epochs(epochs):
            for x, y in trainer.loader(source, global_batch_size=BATCH):
                losses.append(trainer.step(x, y).item())
            in_step.append(str(run.check_in_step(trainer.model)))
        return {
            "losses": losses,
            "weights": tensors_of(model),
            "notes": list(run._session.models.synchronizers[0].notes),
            "in step": in_step,
            "prediction": trainer.predict(source.tensors[0][:5]),
        }

    return in_stages(layout, made.model, body, made.loss, folder, make_optimizer, **options)


def slow(weights: Any) -> Optimizer:
    """Without momentum."""
    return torch.optim.SGD(weights, 0.05)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("mlp", TWO_STAGES, 4),
        ("tied", TWO_STAGES, 4),
        ("residual", "stages=2,microbatches=2,schedule=gems", 4),
        ("tuples", "stages=4,microbatches=2,schedule=interleaved", 4),
        ("skipping", "stages=2,microbatches=3,schedule=zero-bubble", 4),
        ("mlp", "stages=2,microbatches=2,replicas=2+1,recompute", 6),
        ("mlp", "stages=1,microbatches=2", 3),
    ],
)
def test_all_reduce_is_one_process_with_the_global_batch(
    name: str, text: str, size: int, make_optimizer: MakeOptimizer, tmp_path: Path
) -> None:
    """21 samples in batches of 8: the last one is uneven between replicas, and still exact."""
    made = task(name)
    source = samples(made, 21)
    (expected,) = trained(None, made, source, tmp_path / "plain", make_optimizer)
    found = trained(text, made, source, tmp_path / "piped", make_optimizer, size=size)
    assert {key for each in found for key in each["weights"]} == set(expected["weights"])
    for rank, each in enumerate(found):
        assert_weights(each["weights"], expected["weights"], f"rank {rank}")
        assert_close(each["prediction"], expected["prediction"], f"rank {rank}")
        assert each["in step"] == ["all ranks hold the same bytes"] * EPOCHS


@pytest.mark.parametrize(
    ("name", "text", "size", "count"),
    [
        ("mlp", TWO_STAGES, 4, 17),
        ("residual", "stages=2,microbatches=2,schedule=gems", 4, 17),
        ("skipping", "stages=2,microbatches=3,schedule=zero-bubble", 6, 18),
        ("mlp", "stages=1,microbatches=2", 5, 20),
        ("cnn", "tiles=2x1", 4, 17),
    ],
)
def test_a_last_step_with_fewer_samples_than_replicas_is_one_of_its_own(
    name: str, text: str, size: int, count: int, tmp_path: Path
) -> None:
    made = task(name)
    source = samples(made, count)
    (expected,) = trained(None, made, source, tmp_path / "plain")
    found = trained(text, made, source, tmp_path / "piped", size=size)
    for rank, each in enumerate(found):
        assert_weights(each["weights"], expected["weights"], f"rank {rank}")
        assert len(each["losses"]) == len(expected["losses"]) == EPOCHS * 3


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("stages=2,schedule=pipedream", 21),
        ("stages=2,schedule=pipedream", 17),
        ("stages=2,microbatches=2,schedule=2bw", 21),
    ],
)
def test_streams_in_step_are_one_stream_with_the_global_batch(
    text: str, count: int, tmp_path: Path
) -> None:
    """An uneven last batch weighs what it should, although other batches are under way; so does one
    that has fewer samples than there are replicas."""
    made = task("mlp")
    source = samples(made, count)
    expected = trained(text, made, source, tmp_path / "one")
    whole = expected[0]["weights"] | expected[1]["weights"]
    for rank, each in enumerate(trained(text, made, source, tmp_path / "two", size=4)):
        assert_weights(each["weights"], whole, f"rank {rank}")


def test_a_stream_refuses_a_last_step_that_is_too_small_before_the_first(tmp_path: Path) -> None:
    made = task("mlp")
    text, source = "stages=2,microbatches=2,schedule=2bw", samples(made, 17)

    def body(run: Run, trainer: Trainer, model: nn.Module) -> None:
        with torch.no_grad():  # evaluation may
            for x, _ in trainer.loader(source, global_batch_size=BATCH):
                trainer.predict(x)
        for x, y in trainer.loader(source, global_batch_size=BATCH):
            with pytest.raises(UserError, match="the last step of an epoch has 1 samples for 2 re"):
                trainer.step(x, y)
            return

    in_stages(parse_layout(text), made.model, body, made.loss, tmp_path, sgd, size=4)


def test_the_norm_is_clipped_after_the_replicas_have_met(tmp_path: Path) -> None:
    made = task("mlp")
    source = samples(made, 24)
    (expected,) = trained(None, made, source, tmp_path / "plain", slow, clip=0.05)
    (free,) = trained(None, made, source, tmp_path / "plain", slow)
    found = trained(TWO_STAGES, made, source, tmp_path / "piped", slow, size=4, clip=0.05)
    for rank, each in enumerate(found):
        assert_weights(each["weights"], expected["weights"], f"rank {rank}")
    name = "0.weight"
    assert not torch.allclose(free["weights"][name], expected["weights"][name], atol=1e-6)


def test_local_steps_of_one_are_all_reduce(tmp_path: Path) -> None:
    """Without momentum the mean of the weights is what the mean of the gradients makes of them."""
    made = task("mlp")
    source = samples(made, 24)
    (expected,) = trained(None, made, source, tmp_path / "plain", slow)
    found = trained(
        TWO_STAGES, made, source, tmp_path / "piped", slow, size=4, sync=parse("local:every=1")
    )
    for rank, each in enumerate(found):
        assert_weights(each["weights"], expected["weights"], f"rank {rank}")


@pytest.mark.parametrize(
    "text",
    [
        "allreduce:codec=bf16",
        "allreduce:codec=int8",
        "lagged:steps=2",
        "local:every=3",
        "postlocal:every=2",
        "adacomm:start=4,steps=2",
        "diloco:every=3",
        "federated:every=2,fraction=0.75",
        "daso",
    ],
)
@pytest.mark.parametrize("layout", [TWO_STAGES, "stages=2,schedule=pipedream"])
def test_every_strategy_brings_replicas_in_step_and_all_stages_decide_alike(
    text: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunMetrics, "collect_notes", lambda self: None)  # so that they stay
    made = task("mlp")
    source = samples(made, 21 if layout == TWO_STAGES else 24)
    found = trained(
        layout,
        made,
        source,
        tmp_path,
        slow,
        size=4,
        epochs=4,
        sync=parse(text),
        topology=Topology.declared([2, 2]) if text == "daso" else None,
    )
    for rank, each in enumerate(found):
        assert each["in step"] == ["all ranks hold the same bytes"] * 4
        assert_close(each["prediction"], found[0]["prediction"], f"rank {rank}")
    for first, last in ((found[0], found[1]), (found[2], found[3])):
        if layout == TWO_STAGES:  # in a stream they hear of a loss at different times
            assert first["losses"] == last["losses"]
            assert first["notes"] == last["notes"]
    whole = found[0]["weights"] | found[1]["weights"]
    moved = [not torch.equal(whole[name], value) for name, value in made.model.state_dict().items()]
    assert all(moved)
    assert {len(each["losses"]) for each in found} == {12}


def test_adacomm_has_something_to_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that all stages decide alike would say nothing."""
    monkeypatch.setattr(RunMetrics, "collect_notes", lambda self: None)
    made = task("mlp")
    found = trained(
        TWO_STAGES,
        made,
        samples(made, 24),
        tmp_path,
        lambda weights: torch.optim.SGD(weights, 0.3),
        size=4,
        epochs=6,
        sync=parse("adacomm:start=6,steps=3"),
    )
    periods = [note["period"] for note in found[0]["notes"] if "period" in note]
    assert len(set(periods)) > 1
    assert all(each["notes"] == found[0]["notes"] for each in found)


@pytest.mark.parametrize(("size", "count"), [(4, 24), (6, 18)])
def test_batchnorm_over_all_replicas(size: int, count: int, tmp_path: Path) -> None:
    """With one micro-batch it is BatchNorm over the global batch; two samples for three replicas
    count once."""
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.BatchNorm1d(3)]
    made = task("mlp")._replace(model=drawn(nn.Sequential(*layers)))
    source = samples(made, count)
    (expected,) = trained(None, made, source, tmp_path / "plain")
    found = trained(
        "stages=2",
        made,
        source,
        tmp_path / "piped",
        size=size,
        sync=parse("allreduce:batchnorm=sync"),
    )
    for rank, each in enumerate(found):
        assert_weights(each["weights"], expected["weights"], f"rank {rank}")
        assert each["in step"] == ["all ranks hold the same bytes"] * EPOCHS
    several = trained(
        TWO_STAGES, made, source, tmp_path, size=4, sync=parse("allreduce:batchnorm=sync")
    )
    assert several[0]["in step"] == ["all ranks hold the same bytes"] * EPOCHS


def test_replicas_share_the_data_and_the_ranks_of_one_see_the_same(tmp_path: Path) -> None:
    made = task("mlp")
    source = TensorDataset(torch.arange(12.0).double(), torch.zeros(12))

    def body(run: Run, trainer: Trainer, model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [x for x, _ in trainer.loader(source, batch_size=2)]

    found = in_stages(parse_layout(TWO_STAGES), made.model, body, made.loss, tmp_path, size=4)
    seen = [torch.cat(each).tolist() for each in found]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(12))

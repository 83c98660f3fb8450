"""A checkpoint holds one model, whatever it was spread over, and goes on under any other layout."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.models import (
    Batch,
    adamw,
    assert_close,
    assert_weights,
    draw_one_at_a_time,
    drawn,
    dropping,
    in_stages,
    plainly,
    sgd,
    task,
    tensors_of,
)

LAYOUTS = {
    "none": None,
    "three": "stages=3,microbatches=3",
    "two": "stages=2,microbatches=2,schedule=zero-bubble",
    "gems": "stages=3,microbatches=2,schedule=gems",
    "interleaved": "stages=4,microbatches=2,schedule=interleaved",
    "replicated": "stages=2,microbatches=3,replicas=2+1",
}


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state of what this rank holds, by names in the whole model."""
    return {
        f"{name}: {key}": value.clone()
        for name, weight in model.named_parameters()
        if weight.numel()
        for key, value in optimizer.state[weight].items()
    }


def saved(
    layout: str | None, made: Any, batches: Sequence[Batch], folder: Path, **options: Any
) -> Path:
    """Trains from the beginning, and saves."""

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Path:
        for x, y in batches:
            trainer.step(x, y)
        return trainer.save(folder / "kept", steps=len(batches))

    paths = in_stages(layout, made.model, body, made.loss, folder / "runs", adamw, **options)
    assert len(set(paths)) == 1
    return paths[0]


def other_layout(expected: bool) -> contextlib.AbstractContextManager[Any]:
    """Rank 0 says that some things start afresh."""
    return pytest.warns(UserWarning, match="afresh") if expected else contextlib.nullcontext()


@pytest.mark.parametrize("name", ["mlp", "tied"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("three", "two"),
        ("two", "three"),
        ("three", "none"),
        ("none", "three"),
        ("three", "gems"),
        ("gems", "interleaved"),
        ("interleaved", "replicated"),
        ("replicated", "none"),
        ("three", "three"),
    ],
)
def test_it_goes_on_under_another_layout_as_if_never_stopped(
    before: str, after: str, name: str, tmp_path: Path
) -> None:
    made = task(name)
    batches = made.batches([5, 4, 6, 5])
    path = saved(LAYOUTS[before], made, batches[:2], tmp_path)
    halfway = plainly(made.model, batches[:2], made.loss, adamw)
    expected = plainly(made.model, batches, made.loss, adamw)
    other = task(name).model  # with other weights, which must not matter
    drawn(other, seed=77)

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        assert trainer.load(path) == {"steps": 2}
        loaded = tensors_of(model), moments(model, trainer.optimizer)
        losses = [trainer.step(x, y).item() for x, y in batches[2:]]
        return loaded, losses, tensors_of(model), moments(model, trainer.optimizer)

    with other_layout(before != after):
        found = in_stages(LAYOUTS[after], other, body, made.loss, tmp_path / "runs", adamw)
    plain, optimizer = optimizer_after(made, batches[:2], tmp_path)
    wanted = moments(plain, optimizer)
    assert {key for ((_, mine), *_) in found for key in mine} == set(wanted)
    for rank, ((weights, state), losses, at_end, _) in enumerate(found):
        assert_weights(weights, halfway.weights, f"loaded on rank {rank}")
        assert_weights(state, wanted, f"loaded on rank {rank}")
        assert_close(losses, expected.losses[2:], f"losses on rank {rank}")
        assert_weights(at_end, expected.weights, f"in the end on rank {rank}")
    plain, optimizer = optimizer_after(made, batches, tmp_path)
    for rank, (*_, state) in enumerate(found):
        assert_weights(state, moments(plain, optimizer), f"in the end on rank {rank}")


def optimizer_after(
    made: Any, batches: Sequence[Batch], folder: Path
) -> tuple[nn.Module, Optimizer]:
    kept: list[tuple[nn.Module, Optimizer]] = []

    def body(run: Run, trainer: Trainer, model: nn.Module) -> None:
        for x, y in batches:
            trainer.step(x, y)
        kept.append((model, trainer.optimizer))

    in_stages(None, made.model, body, made.loss, folder, adamw)
    return kept[0]


def test_statistics_of_batchnorm_and_learning_rates_go_along(tmp_path: Path) -> None:
    made = task("mlp")._replace(
        model=drawn(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
        )
    )
    batches = made.batches([6, 6])

    def train(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.005
        for x, y in batches:
            trainer.step(x, y)
        trainer.save(tmp_path / "kept")
        return tensors_of(model), trainer.predict(batches[0][0])

    def load(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        trainer.load(tmp_path / "kept")
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        return tensors_of(model), trainer.predict(batches[0][0]), rates

    first = in_stages("stages=2,microbatches=2", made.model, train, made.loss, tmp_path / "a")
    with other_layout(True):
        second = in_stages(
            "stages=4,microbatches=2,schedule=gems", made.model, load, made.loss, tmp_path / "b"
        )
    whole = {name: value for weights, _ in first for name, value in weights.items()}
    assert {"1.running_mean", "3.running_var", "3.num_batches_tracked"} <= set(whole)
    for weights, prediction, rates in second:
        assert_weights(weights, whole, "loaded")
        assert_close(prediction, first[0][1], "prediction")
        assert rates == [0.005]


class Spare(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(4, 4), nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_what_no_stage_uses_is_saved_too(tmp_path: Path) -> None:
    """On one rank, where tracing the model needs no care."""
    model, untouched = drawn(Spare()), drawn(Spare())
    (x, y), *_ = task("mlp").batches([4])

    def save(run: Run) -> None:
        trainer = run.trainer(
            model, F.mse_loss, sgd, layout="stages=2,microbatches=2,schedule=interleaved"
        )
        trainer.step(x, y)
        trainer.save(tmp_path / "kept")

    def load(run: Run) -> dict[str, Tensor]:
        other = drawn(Spare(), seed=9)
        run.trainer(other, F.mse_loss, sgd).load(tmp_path / "kept")
        return tensors_of(other)

    run_world(1, save, folder=tmp_path / "a")
    with other_layout(True):
        (found,) = run_world(1, load, folder=tmp_path / "b")
    assert torch.equal(found["spare.weight"], untouched.state_dict()["spare.weight"])
    assert not torch.equal(found["first.weight"], untouched.state_dict()["first.weight"])


def test_saving_in_the_middle_of_a_pass_drains_a_stream(tmp_path: Path) -> None:
    """What is saved is what anybody who looks at that moment sees."""
    made = task("mlp")
    batches = made.batches([4] * 7)
    layout = "stages=3,schedule=pipedream"

    def with_save(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        for x, y in batches[:4]:
            trainer.step(x, y)
        trainer.save(tmp_path / "kept")
        at_save = tensors_of(model)
        for x, y in batches[4:]:
            trainer.step(x, y)
        trainer.predict(batches[0][0])
        return at_save, tensors_of(model)

    def with_look(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        for x, y in batches[:4]:
            trainer.step(x, y)
        trainer.predict(batches[0][0])
        at_look = tensors_of(model)
        for x, y in batches[4:]:
            trainer.step(x, y)
        trainer.predict(batches[0][0])
        return at_look, tensors_of(model)

    def load(run: Run, trainer: Trainer, model: nn.Module) -> dict[str, Tensor]:
        trainer.load(tmp_path / "kept")
        return tensors_of(model)

    one = in_stages(layout, made.model, with_save, made.loss, tmp_path / "a")
    two = in_stages(layout, made.model, with_look, made.loss, tmp_path / "b")
    with other_layout(True):
        (whole,) = in_stages(None, made.model, load, made.loss, tmp_path / "c")
    for ours, theirs in zip(one, two, strict=True):
        for mine, wanted in zip(ours, theirs, strict=True):
            assert_weights(mine, wanted, "with a save, and with a look")
        assert_weights(ours[0], whole, "saved")


@pytest.mark.parametrize("text", ["stages=2,microbatches=2", "stages=2,schedule=pipedream"])
def test_dropout_goes_on_where_it_was(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_one_at_a_time(monkeypatch)
    batches = task("mlp").batches([4] * 5)

    def first_half(run: Run, trainer: Trainer, model: nn.Module) -> None:
        for x, y in batches[:3]:
            trainer.step(x, y)
        trainer.save(tmp_path / "kept")

    def second_half(run: Run, trainer: Trainer, model: nn.Module) -> dict[str, Tensor]:
        assert trainer.load(tmp_path / "kept") is not None
        for x, y in batches[3:]:
            trainer.step(x, y)
        trainer.predict(batches[0][0])
        return tensors_of(model)

    def in_one(run: Run, trainer: Trainer, model: nn.Module) -> dict[str, Tensor]:
        first_half(run, trainer, model)
        for x, y in batches[3:]:
            trainer.step(x, y)
        trainer.predict(batches[0][0])
        return tensors_of(model)

    expected = in_stages(text, dropping(), in_one, F.mse_loss, tmp_path / "a", adamw)
    found = in_stages(text, dropping(), second_half, F.mse_loss, tmp_path / "b", adamw)
    for ours, theirs in zip(found, expected, strict=True):
        assert_weights(ours, theirs, "stopped and resumed")


def test_the_scale_of_the_loss_goes_on_where_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x, y = torch.ones(4, 4), torch.zeros(4, 3)

    def scale(run: Run) -> float:
        return float(
            run._session.models.synchronizers[0].state_dict()["pipeline"]["scale"]["value"]
        )

    def save(run: Run, trainer: Trainer, _: nn.Module) -> float:
        trainer.step(x, y)
        trainer.step(x, y + 1e38)
        trainer.save(tmp_path / "kept")
        return scale(run)

    def load(run: Run, trainer: Trainer, _: nn.Module) -> float:
        trainer.load(tmp_path / "kept")
        return scale(run)

    options = {"precision": torch.float16}
    for body in (save, load):
        found = in_stages(
            "stages=2,microbatches=2", model, body, F.mse_loss, tmp_path / "a", **options
        )
        assert found == [2.0**15] * 2


def test_the_data_go_on_where_they_were(tmp_path: Path) -> None:
    """Saved in the middle of an epoch, with two pipelines that share the data."""
    made = task("mlp")
    (x, y), *_ = made.batches([22])
    source = TensorDataset(x, y)
    layout = "stages=2,microbatches=2"

    def train(stop_after: int | None, resume: bool) -> list[Any]:
        def body(run: Run, trainer: Trainer, model: nn.Module) -> Any:
            if resume:
                assert trainer.load(tmp_path / "kept") is not None
            for _epoch in run.epochs(2):
                for step, (inputs, targets) in enumerate(trainer.loader(source, batch_size=3)):
                    trainer.step(inputs, targets)
                    if step + 1 == stop_after:
                        trainer.save(tmp_path / "kept")
                        return None
            return tensors_of(model)

        folder = tmp_path / f"{stop_after}-{resume}"
        return in_stages(layout, made.model, body, made.loss, folder, adamw, size=4)

    expected = train(None, False)
    train(2, False)
    found = train(None, True)
    for ours, theirs in zip(found, expected, strict=True):
        assert_weights(ours, theirs, "stopped and resumed")


def test_the_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    made = task("mlp")
    path = saved(LAYOUTS["three"], made, made.batches([4]), tmp_path)

    def body(run: Run, trainer: Trainer, _: nn.Module) -> None:
        with pytest.raises(
            CheckpointError, match=r"does not fit this script's model .*: it has no '5\.weight'"
        ):
            trainer.load(path)

    longer = drawn(nn.Sequential(*task("mlp").model, nn.Linear(3, 3)))  # type: ignore[misc]
    in_stages(LAYOUTS["two"], longer, body, made.loss, tmp_path / "runs", adamw)

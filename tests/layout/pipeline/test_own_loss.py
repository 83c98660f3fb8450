"""Several inputs, and models that compute their own loss: as the plain model, under all layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole import Layout, UserError
from farandole.errors import StageError
from farandole.layout import parse_layout
from farandole.layout.objective import own_loss
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.gpt import GPT, WORDS
from tests.layout.models import Recorder, assert_close, assert_weights, drawn, sgd, tensors_of

Step = tuple[Any, Any]  # inputs and targets
Loss = Callable[[Any, Any], Tensor] | None
Plain = Callable[[nn.Module, Any, Any], Tensor]
LAYOUTS = (
    "stages=1,microbatches=3",
    "stages=2",
    "stages=2,microbatches=3,schedule=gpipe",
    "stages=4,microbatches=2",
    "stages=4,microbatches=2,schedule=interleaved",
    "stages=4,microbatches=2,schedule=zero-bubble",
    "stages=4,microbatches=2,schedule=gems",
    "stages=2,microbatches=2,bidirectional",
    "stages=2,microbatches=2,replicas=1+2",
    "stages=2,microbatches=2,recompute",
)


class Output(dict[str, Any]):
    """As Hugging Face's: a dictionary with attributes."""

    @property
    def loss(self) -> Tensor:
        found: Tensor = self["loss"]
        return found


class Labelled(GPT):
    """Keyword arguments, and an output with a `loss`."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits, loss = super().forward(input_ids, labels)
        assert loss is not None
        return {"loss": loss, "logits": logits}


def words(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def of(kind: str) -> tuple[nn.Module, list[Step], Plain, Loss]:
    """A model, its batches (uneven, of other lengths), and how a script computes its loss."""
    rows = [(6, 5), (5, 5), (4, 9)]
    pairs = [(words(b, t, b), words(b, t, b + 1)) for b, t in rows]
    if kind == "positional":  # targets are the last argument
        return GPT(), list(pairs), lambda model, x, y: model(x, y)[1], None
    if kind == "tuple":
        return GPT(), [((x, y), None) for x, y in pairs], lambda model, x, _: model(*x)[1], None
    if kind == "named":
        batches = [({"input_ids": x, "labels": y}, None) for x, y in pairs]
        return Labelled(), list(batches), lambda model, x, _: model(**x)["loss"], None
    assert kind == "loss"

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    class Masked(GPT):
        def forward(self, idx: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            logits, _ = super().forward(idx, idx)
            return logits * mask[..., None]

    batches = [({"idx": x, "mask": (x > 3).double()}, y) for x, y in pairs]
    return Masked(), list(batches), lambda model, x, y: loss(model(**x), y), loss


def plainly(model: nn.Module, batches: Sequence[Step], loss: Plain) -> tuple[list[float], Any, Any]:
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    recorder = Recorder(model, optimizer)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, recorder.steps, tensors_of(model)


def trained(
    model: nn.Module,
    batches: Sequence[Step],
    folder: Path,
    layout: Layout | None,
    loss: Loss = None,
    **options: Any,
) -> list[Any]:
    size = 1 if layout is None else layout.ranks
    models = [copy.deepcopy(model) for _ in range(size)]
    x, y = batches[0]
    if layout is not None:
        options.setdefault("sample", x if y is None or loss is not None else (x, y))

    def body(run: Run) -> Any:
        model = models[run.rank]
        trainer = run.trainer(model, loss, sgd, layout=layout, **options)
        recorder = Recorder(model, trainer.optimizer)
        losses = [(trainer.step(x) if y is None else trainer.step(x, y)).item() for x, y in batches]
        return losses, recorder.steps, tensors_of(model)

    return run_world(size, body, folder=folder)


def assert_as_plain(found: Sequence[Any], expected: Any) -> None:
    losses, gradients, weights = expected
    assert {name for rank in found for name in rank[2]} == set(weights)
    for number, (own_losses, own_gradients, own_weights) in enumerate(found):
        assert_close(own_losses, losses, f"losses of rank {number}")
        for ours, theirs in zip(own_gradients, gradients, strict=True):
            assert_weights(ours, theirs, f"a gradient on rank {number}")
        assert_weights(own_weights, weights, f"rank {number}")


@pytest.mark.parametrize("kind", ["positional", "tuple", "named", "loss"])
def test_without_a_layout(kind: str, tmp_path: Path) -> None:
    model, batches, plain, loss = of(kind)
    model = drawn(model)
    found = trained(model, batches, tmp_path, None, loss)
    assert_as_plain(found, plainly(model, batches, plain))


@pytest.mark.parametrize("text", LAYOUTS)
def test_under_every_schedule(text: str, tmp_path: Path) -> None:
    model, batches, plain, _ = of("positional")
    model = drawn(model)
    found = trained(model, batches, tmp_path, parse_layout(text))
    assert_as_plain(found, plainly(model, batches, plain))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw,microbatches=2"])
def test_a_stream_learns_as_it_does_with_a_loss_function(schedule: str, tmp_path: Path) -> None:
    class Untied(GPT):  # as streams want it
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    class Logits(Untied):
        def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(idx, idx)[0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    batches = [(words(4, 5, seed), words(4, 5, seed + 1)) for seed in range(4)]
    layout = parse_layout(f"stages=2,schedule={schedule},cuts=layers.1+layers.2,balance=1+2")
    own = trained(drawn(Untied()), batches, tmp_path / "own", layout)
    told = trained(drawn(Logits()), batches, tmp_path / "told", layout, loss)
    for ours, theirs in zip(own, told, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-10, equal_nan=True)
        assert_weights(ours[2], theirs[2], "weights")


@pytest.mark.parametrize("kind", ["tuple", "named", "loss"])
def test_inputs_of_every_kind(kind: str, tmp_path: Path) -> None:
    model, batches, plain, loss = of(kind)
    model = drawn(model)
    found = trained(model, batches, tmp_path, parse_layout("stages=3,microbatches=2"), loss)
    assert_as_plain(found, plainly(model, batches, plain))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.layer(x) * scale, y


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        output = self.layer(both[0].tanh())
        return output, F.mse_loss(output, both[1])


def test_a_list_of_blocks_needs_no_sample(tmp_path: Path) -> None:
    model = drawn(nn.Sequential(First(), nn.Identity(), Last()))
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows in (5, 4):
        x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (4, 3))
        batches.append(({"x": x, "y": y, "scale": 0.5}, None))

    def plain(model: nn.Module, given: Any, _: Any) -> Any:
        first, middle, last = model  # type: ignore[misc]
        return last(middle(first(**given)))[1]

    layout = parse_layout("stages=2,microbatches=2,balance=2+1")
    found = trained(model, batches, tmp_path, layout, sample=None)
    assert_as_plain(found, plainly(model, batches, plain))


# Means over what is not masked


def masked(rows: Sequence[int], ignored: int = -1) -> list[Step]:
    """Batches in which the samples have different numbers of targets that count."""
    batches: list[Step] = []
    for count in rows:
        x, y = words(count, 6, count), words(count, 6, count + 9)
        for row in range(count):
            y[row, row % 5 :] = ignored
        batches.append((x, y))
    return batches


def counted(inputs: Tensor, targets: Tensor) -> Tensor:
    return (targets != -1).sum()


@pytest.mark.parametrize(
    "text", ["stages=2,microbatches=3", "stages=2,microbatches=2,schedule=gems"]
)
def test_masked_means_are_exact_when_told_what_counts(text: str, tmp_path: Path) -> None:
    model, batches = drawn(GPT()), masked([6, 5])
    layout = parse_layout(text)
    found = trained(model, batches, tmp_path, layout, loss_weight=counted)
    assert_as_plain(found, plainly(model, batches, lambda model, x, y: model(x, y)[1]))


def test_a_micro_batch_that_counts_for_nothing_is_left_out(tmp_path: Path) -> None:
    model, batches = drawn(GPT()), masked([6])
    batches[0][1][:3] = -1  # the mean of nothing is no number
    layout = parse_layout("stages=2,microbatches=2,schedule=gpipe")
    found = trained(model, batches, tmp_path, layout, loss_weight=counted)
    assert_as_plain(found, plainly(model, batches, lambda model, x, y: model(x, y)[1]))


@pytest.mark.parametrize(
    "text",
    [
        "stages=2,microbatches=2",
        "stages=2,microbatches=2,schedule=gems",
        "stages=2,microbatches=2,replicas=1+2",
        "stages=2,microbatches=2,schedule=2bw",
    ],
)
def test_masked_means_are_refused_when_not(text: str, tmp_path: Path) -> None:
    if "2bw" in text:  # which refuses tied weights
        model = GPT()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    else:
        model = GPT()
    with pytest.raises(StageError, match=r"targets that count .* loss_weight=lambda"):
        trained(drawn(model), masked([6]), tmp_path, parse_layout(text))


def test_a_loss_function_with_weights_of_classes(tmp_path: Path) -> None:
    weight = torch.linspace(0.1, 2, WORDS, dtype=torch.float64)
    model = drawn(nn.Sequential(nn.Embedding(WORDS, 4), nn.Tanh(), nn.Linear(4, WORDS)))
    x, y = torch.arange(8), torch.arange(8) % WORDS

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, weight=weight)

    layout = parse_layout("stages=2,microbatches=2")
    with pytest.raises(StageError, match=r"targets that count"):
        trained(model, [(x, y)], tmp_path / "refused", layout, loss, sample=None)
    found = trained(
        model,
        [(x, y)],
        tmp_path / "told",
        layout,
        loss,
        sample=None,
        loss_weight=lambda _, targets: weight[targets].sum(),
    )
    assert_as_plain(found, plainly(model, [(x, y)], lambda model, x, y: loss(model(x), y)))


@pytest.mark.parametrize("weighted", [False, True])
def test_masked_pixels_on_tiles(weighted: bool, tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64) if weighted else None
    model = drawn(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1)))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (4, 6, 6), generator=generator)
    y[0, :3] = -100

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, weight=weight)

    def counted(_: Tensor, targets: Tensor) -> Tensor:
        kept = targets[targets != -100]
        return kept.new_tensor(len(kept)) if weight is None else weight[kept].sum()

    layout = parse_layout("tiles=2x1,microbatches=2")
    with pytest.raises(StageError, match=r"targets that count"):
        trained(model, [(x, y)], tmp_path / "refused", layout, loss, sample=None)
    found = trained(
        model, [(x, y)], tmp_path / "told", layout, loss, sample=None, loss_weight=counted
    )
    _, _, weights = plainly(model, [(x, y)], lambda model, x, y: loss(model(x), y))
    for _, _, own in found:
        assert_weights(own, weights, "weights")


def test_masks_that_are_the_same_in_all_samples_go(tmp_path: Path) -> None:
    model, (batch,) = drawn(GPT()), masked([6])
    x, y = batch[0], words(6, 6, 1)
    y[:, :2] = -1
    found = trained(model, [(x, y)], tmp_path, parse_layout("stages=2,microbatches=3"))
    assert_as_plain(found, plainly(model, [(x, y)], lambda model, x, y: model(x, y)[1]))


# What is refused


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (torch.ones(3), r"is a tensor of \(3,\), torch.float32"),
        ((torch.ones(3), None), r"is \(a tensor of \(3,\), torch.float32, None\)"),
        ((torch.ones(()), torch.ones(())), "with exactly one number"),
        (torch.ones((), dtype=torch.long), "torch.int64"),
        ({"logits": torch.ones(3)}, "a dictionary of logits"),
        ({"loss": None}, "a dictionary of loss"),
        (None, "output is None"),
        (Output(loss=torch.ones(2)), "loss"),
    ],
)
def test_no_loss_in_the_output(output: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        own_loss(output)


def test_a_loss_in_the_output() -> None:
    one = torch.ones(())
    for output in (one, (torch.ones(3), one), [one], {"loss": one, "other": 1}, Output(loss=one)):
        assert own_loss(output) is one


def test_targets_have_no_place_among_keywords(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        trainer = run.trainer(Labelled(), None, sgd)
        x = words(2, 3, 0)
        with pytest.raises(UserError, match=r"step\({…, 'labels': targets}\)"):
            trainer.step({"input_ids": x}, x)

    run_world(1, body, folder=tmp_path)


def refused(layout: str, model: nn.Module, tmp_path: Path, **options: Any) -> str:
    chosen = parse_layout(layout)
    models = [copy.deepcopy(model) for _ in range(chosen.ranks)]
    x = words(4, 5, 0)

    def train(run: Run) -> None:
        trainer = run.trainer(models[run.rank], None, sgd, layout=chosen, **options)
        trainer.step(x, x)

    def body(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run)
        return str(caught.value)

    said: list[str] = run_world(chosen.ranks, body, folder=tmp_path)
    return said[0]


def test_several_inputs_without_a_sample(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(WORDS, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.two(self.one(x)).mean()

    said = refused("stages=2", Plain(), tmp_path)
    assert "cut without a sample" in said
    assert "given 0, 1" in said


def test_ranks_with_samples_that_are_cut_differently(tmp_path: Path) -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(x.shape[1]):
                x = self.two(self.one(x).tanh())
            return x

    def body(run: Run) -> None:
        sample = torch.ones(2, 2 + run.rank, 4)
        with pytest.raises(
            UserError, match=r"rank 1 cuts .* 6 blocks.* rank 0 into 4.* same sample"
        ):
            run.trainer(Unrolled(), F.mse_loss, sgd, layout="stages=2", sample=sample)

    run_world(2, body, folder=tmp_path)


def test_its_own_loss_on_tiles(tmp_path: Path) -> None:
    assert "of a tile it would be another" in refused("tiles=2x1", GPT(), tmp_path)


def test_predictions_of_a_model_with_its_own_loss(tmp_path: Path) -> None:
    model = drawn(Labelled(dropout=0.5))
    batch = {"input_ids": words(5, 6, 0), "labels": words(5, 6, 1)}
    layout = parse_layout("stages=2,microbatches=2")
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(run: Run) -> Any:
        trainer: Trainer = run.trainer(models[run.rank], None, sgd, layout=layout, sample=batch)
        return trainer.predict(batch)

    expected = model.eval()(**batch)
    for found in run_world(2, body, folder=tmp_path):
        assert_close(found, {name: value.detach() for name, value in expected.items()})

"""Tiles × stages × micro-batches × directions × replicas compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole import Layout, UserError
from farandole.errors import StageError
from farandole.layout import parse_layout
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.models import (
    Batch,
    assert_close,
    assert_same,
    draw_one_at_a_time,
    drawn,
    in_stages,
    plainly,
    trained_in_stages,
)

SIZE = 12


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


def classifier(*, norm: bool = False) -> nn.Module:
    """Tiles end at the Flatten."""
    layers: list[nn.Module] = [nn.Conv2d(3, 6, 3, padding=1)]
    layers += [nn.BatchNorm2d(6)] if norm else []
    layers += [nn.ReLU(inplace=True), Residual(6), nn.Conv2d(6, 6, 3, stride=2, padding=1)]
    layers += [nn.Tanh(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 8, 1), nn.Flatten()]
    layers += [nn.Linear(72, 10)] + ([nn.BatchNorm1d(10)] if norm else [])
    return drawn(nn.Sequential(*layers, nn.Tanh(), nn.Linear(10, 4)))


def segmenter() -> nn.Module:
    """Tiles to the end: the loss is one of pixels."""
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), Residual(6)]
    layers += [nn.ConvTranspose2d(6, 5, 2, stride=2), nn.Conv2d(5, 4, 3, padding=1)]
    return drawn(nn.Sequential(*layers))


def batches(rows: list[int], *, pixels: bool = False, size: int = SIZE) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in rows:
        x = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
        shape = (count, size, size) if pixels else (count,)
        found.append((x, torch.randint(4, shape, generator=generator)))
    return found


def summed(found: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(found, wanted, reduction="sum")


@pytest.mark.parametrize(
    "text",
    [
        "tiles=2x2",
        "tiles=3x1",
        "tiles=2x2,stages=2,tiled=1",
        "tiles=2x1,stages=3,tiled=2",
        "tiles=2x2,recompute",
        "tiles=2x2,recompute,recompute_blocks=1",
        "tiles=2x1,stages=2,recompute,recompute_blocks=2,offload",
        "tiles=2x2,halo=3",
        "tiles=2x2,overlap=false,halo=1",
        "tiles=2x2,handoff=7",
        "tiles=2x2,reduction=sum",
        "tiles=2x2,in_turn",
        "tiles=2x2,in_turn,recompute,recompute_blocks=2,offload",
        "channels=2",
        "channels=2,tiles=2x1",
    ],
)
def test_a_model_with_batchnorm(text: str, tmp_path: Path) -> None:
    """Statistics are those of all tiles, and behind the tiles of all samples; some shards have no
    sample of their own."""
    layout, model = parse_layout(text), classifier(norm=True)
    loss = summed if layout.reduction == "sum" else F.cross_entropy
    data = batches([5, 3, 2])
    ranks = trained_in_stages(layout, model, data, loss, tmp_path)
    assert_same(ranks, plainly(model, data, loss))


@st.composite
def products(draw: st.DrawFn) -> Layout:
    tiles = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (1, 3)]))
    stages = draw(st.integers(1, 2 if tiles == (2, 2) else 3))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "gems", "bidirectional", "interleaved"]))
    options: dict[str, Any] = {"schedule": schedule}
    micros = draw(st.integers(1, 3))
    if schedule == "bidirectional":
        options = {"schedule": draw(st.sampled_from(["gpipe", "1f1b"])), "bidirectional": True}
        micros *= 2
    elif schedule == "gems":
        micros *= 2
    elif schedule == "interleaved":
        stages *= 2
    options["recompute"] = draw(st.booleans())
    return Layout(
        tiles=tiles,
        stages=stages,
        microbatches=micros,
        halo=draw(st.sampled_from([1, 2, "auto"])),
        overlap=draw(st.booleans()),
        **options,
    )


@settings(max_examples=12, derandomize=True)
@given(products(), st.lists(st.integers(1, 5), min_size=1, max_size=2), st.booleans())
def test_products(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, rows: list[int], pixels: bool
) -> None:
    model = segmenter() if pixels else classifier()
    data = batches(rows, pixels=pixels)
    ranks = trained_in_stages(
        layout, model, data, F.cross_entropy, tmp_path_factory.mktemp("product")
    )
    assert_same(ranks, plainly(model, data, F.cross_entropy))


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("text", ["tiles=2x2", "tiles=2x1,stages=2", "tiles=2x2,in_turn"])
def test_classes_that_weigh_more_or_nothing(text: str, pixels: bool, tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 5.0, 0.2, 2.0], dtype=torch.float64)

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(found, wanted, weight, ignore_index=2, label_smoothing=0.1)

    model = segmenter() if pixels else classifier()
    data = batches([5, 3], pixels=pixels)
    ranks = trained_in_stages(parse_layout(text), model, data, loss, tmp_path)
    assert_same(ranks, plainly(model, data, loss))


class Telling(nn.Module):
    """Returns a number beside its outputs while it learns, and one for each sample."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.body(x)
        size = {"size": found.square().mean()} if self.training else {}
        return {"scores": found, "each": found.sum(1), **size}


@pytest.mark.parametrize("rows", [[5, 3], [2, 1]])
@pytest.mark.parametrize("text", ["tiles=2x2", "tiles=2x1,stages=2", "tiles=1x2,halo=2,recompute"])
def test_a_loss_may_do_anything_with_its_samples(
    text: str, rows: list[int], tmp_path: Path
) -> None:
    """It sees all of them, and not a shard's share."""

    def loss(found: Any, wanted: Tensor) -> Tensor:
        apart = (found["each"][:, None] - found["each"]).abs().sum()  # every two samples
        each = F.cross_entropy(found["scores"], wanted, reduction="none")
        return each[wanted != 2].sum() / (1 + (wanted != 2).sum()) + apart + 3 * found["size"]

    body = classifier()
    model = nn.Sequential(*list(body)[:-1], Telling(list(body)[-1]))
    data = batches(rows)
    found = trained_in_stages(parse_layout(text), model, data, loss, tmp_path)
    assert_same(found, plainly(model, data, loss))


def test_a_loss_that_picks_pixels(tmp_path: Path) -> None:
    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(found, wanted, reduction="none")[wanted != 2].mean()

    model, data = segmenter(), batches([5, 3], pixels=True)
    ranks = trained_in_stages(parse_layout("tiles=2x2"), model, data, loss, tmp_path)
    assert_same(ranks, plainly(model, data, loss))


class Scaled(nn.Module):
    """By constants that look like one sample, before and behind a branch that hands off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer(
            "scale", torch.linspace(1, 2, 4, dtype=torch.float64)[None, :, None, None]
        )
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * SIZE * SIZE, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale
        scores = self.head(x.reshape(x.shape[0], -1))
        return scores + (self.norm(x) * self.scale).mean((2, 3))


@pytest.mark.parametrize("text", ["tiles=2x1", "tiles=2x1,recompute,recompute_blocks=1"])
@pytest.mark.parametrize("rows", [[3, 1], [2, 4]])
def test_shards_decide_alike(text: str, rows: list[int], tmp_path: Path) -> None:
    """Though one of them has one sample, and the other two or none."""
    model, data = drawn(nn.Sequential(Scaled(), nn.Identity())), batches(rows)
    ranks = trained_in_stages(parse_layout(text), model, data, F.cross_entropy, tmp_path)
    assert_same(ranks, plainly(model, data, F.cross_entropy))


@pytest.mark.parametrize("text", ["tiles=2x2", "tiles=2x1,channels=2", "tiles=2x2,in_turn"])
def test_statistics_that_move_once_a_step(text: str, tmp_path: Path) -> None:
    """Running statistics with one micro-batch are the plain ones; deferred, with any number."""
    model, data = classifier(norm=True), batches([5, 3])
    layout = parse_layout(f"{text},batchnorm=deferred")
    ranks = trained_in_stages(layout, model, data, F.cross_entropy, tmp_path)
    assert_same(ranks, plainly(model, data, F.cross_entropy))


def test_replicas_of_tiled_pipelines(tmp_path: Path) -> None:
    """Five dimensions: tiles, stages, micro-batches, two directions, and data."""
    layout = parse_layout("tiles=2x1,stages=2,microbatches=2,bidirectional")
    model, data = classifier(), batches([4, 4])
    halves = [[(x[half::2], y[half::2]) for x, y in data] for half in (0, 1)]

    def body(run: Run, trainer: Trainer, model: nn.Module) -> dict[str, Tensor]:
        for x, y in halves[run.rank // layout.ranks]:
            trainer.step(x, y)
        return {name: value.clone() for name, value in model.state_dict().items() if value.numel()}

    ranks = in_stages(layout, model, body, F.cross_entropy, tmp_path, size=2 * layout.ranks)
    expected = plainly(model, data, F.cross_entropy).weights
    for found in ranks:
        for name, value in found.items():
            assert_close(value, expected[name], name)


def test_dropout_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_one_at_a_time(monkeypatch)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.Dropout(0.3), nn.Dropout2d(0.4), nn.Flatten()]
    model = drawn(nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(6 * SIZE * SIZE, 4)))
    data = batches([5, 1])
    one = trained_in_stages(Layout(stages=2), model, data, F.cross_entropy, tmp_path / "one")
    tiled = trained_in_stages(
        Layout(tiles=(2, 1), in_turn=True), model, data, F.cross_entropy, tmp_path / "tiled"
    )
    assert_close(tiled[0].losses, one[0].losses)


def test_a_shape_may_change_between_steps(tmp_path: Path) -> None:
    layout, model = parse_layout("tiles=2x2,halo=2"), segmenter()
    data = [*batches([2], pixels=True), *batches([3], pixels=True, size=10)]
    ranks = trained_in_stages(layout, model, data, F.cross_entropy, tmp_path)
    assert_same(ranks, plainly(model, data, F.cross_entropy))


class Branching(nn.Module):
    """Cannot be traced: what it does depends on a shape."""

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        self.spoils = spoils
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3 * SIZE * SIZE, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        if found.shape == x.shape:
            found = found + x
        if self.spoils:
            found[:, :, 0] = 0
        return self.head(found.reshape(x.shape[0], -1))  # type: ignore[no-any-return]


def untraced(spoils: bool, folder: Path) -> list[list[float]]:
    def body(run: Run, trainer: Trainer, model: nn.Module) -> list[float]:
        return [trainer.step(x, y).item() for x, y in batches([3, 2])]

    model = drawn(nn.Sequential(Branching(spoils)))[0]
    layout = parse_layout("tiles=2x1,in_turn")
    return in_stages(layout, Opaque(model), body, F.cross_entropy, folder)


class Opaque(nn.Sequential):
    """Given to a trainer as it is."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self[0](x)
        if found.shape[0] != x.shape[0]:
            raise AssertionError
        return found


def test_a_model_that_cannot_be_traced(tmp_path: Path) -> None:
    """In one stage it need not be."""
    expected = plainly(drawn(nn.Sequential(Branching())), batches([3, 2]), F.cross_entropy)
    assert_close(untraced(False, tmp_path)[0], expected.losses)
    with pytest.raises(StageError, match="0: __setitem__ cannot change a tensor on tiles in place"):
        untraced(True, tmp_path)


class Stored:
    """Images in a file, of which parts can be read; it notes what was."""

    image_size = (SIZE, SIZE)

    def __init__(self, path: Path, data: list[Batch]) -> None:
        images = torch.cat([x for x, _ in data]).numpy()
        images.tofile(path)
        # Not by `np.load`: the parser of its header fails in several threads (Python < 3.11.8).
        self._map = np.memmap(path, images.dtype, "r", shape=images.shape)
        self._labels = torch.cat([y for _, y in data])
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Any:
        return self.tile(index, (slice(0, SIZE), slice(0, SIZE)))

    def tile(self, index: int, box: tuple[slice, ...]) -> Any:
        image = np.array(self._map[(index, slice(None), *box)])
        self.read.append(image.size)
        labels = self._labels[index]
        return torch.from_numpy(image), labels[box] if labels.dim() else labels


@pytest.mark.parametrize("pixels", [False, True])
def test_each_rank_reads_its_tile_alone(tmp_path: Path, pixels: bool) -> None:
    layout, data = parse_layout("tiles=2x2,microbatches=2"), batches([4, 4], pixels=pixels)
    model = segmenter() if pixels else classifier()

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        stored = Stored(tmp_path / f"{run.rank}.raw", data)
        losses = []
        for _ in range(2):
            for x, y in trainer.loader(stored, 4, shuffle=False):
                assert tuple(x.shape) == (4, 3, SIZE, SIZE)
                losses.append(trainer.step(x, y).item())
        return losses, stored.read

    found = in_stages(layout, model, body, F.cross_entropy, tmp_path)
    expected = plainly(model, data * 2, F.cross_entropy).losses
    for losses, read in found:
        assert_close(losses, expected)
        assert set(read) == {3 * SIZE * SIZE // 4}
        assert len(read) == 16


@pytest.mark.parametrize(
    ("text", "layers", "size", "told"),
    [
        ("tiles=4x4", (), 3, r"\(3, 3\) cannot be cut into 4x4 tiles.*fewer tiles"),
        ("tiles=2x2,handoff=3", (nn.Flatten(1, 2),), 12, "1: .* needs the whole image"),
        (
            "tiles=2x2,stages=2,tiled=1,balance=3+2",
            (nn.Flatten(2), nn.Tanh()),
            12,
            "1: .* needs the whole image, and belongs to a stage with a rank for every tile",
        ),
    ],
)
def test_what_cannot_be_tiled_is_named(
    text: str, layers: tuple[nn.Module, ...], size: int, told: str, tmp_path: Path
) -> None:
    model = drawn(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Tanh(), nn.Tanh()))
    data = batches([2], size=size)
    with pytest.raises((StageError, UserError), match=told):
        trained_in_stages(parse_layout(text), model, data, lambda x, y: x.sum(), tmp_path)


def test_a_handoff_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="handoff: the model has no submodule 'tail'"):
        trained_in_stages(
            parse_layout("tiles=2x2,handoff=tail"),
            classifier(),
            batches([2]),
            F.cross_entropy,
            tmp_path,
        )

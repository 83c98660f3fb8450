"""Large images in arrays and slides: parts of them are read, and each rank reads its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole as fd
from farandole.data.images.parts import ImageParts
from farandole.errors import DataError, UserError
from farandole.train import Run
from farandole.train.trainer import Trainer
from tests.layout.models import assert_close, drawn, in_stages, plainly

pytestmark = [pytest.mark.needs("h5py"), pytest.mark.needs("zarr"), pytest.mark.needs("tifffile")]

SIZE, TILE, COUNT = 64, 16, 2
LABELS = [1, 0]


def pictures() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (COUNT, 3, SIZE, SIZE), np.uint8)


def write_slide(path: Path, image: np.ndarray[Any, Any], **options: Any) -> None:
    """Rows × columns × channels, in tiles, with a second level of half the size."""
    import tifffile

    options = {"tile": (TILE, TILE), "compression": "zlib", "metadata": None} | options
    with tifffile.TiffWriter(path) as file:
        file.write(image, subifds=1, photometric="rgb", **options)
        file.write(image[::2, ::2], subfiletype=1, photometric="rgb", **options)


def slides(folder: Path) -> ImageParts:
    for number, image in enumerate(pictures()):
        if not (folder / f"{number}.tif").exists():
            write_slide(folder / f"{number}.tif", image.transpose(1, 2, 0))
    return fd.data.slides(str(folder / "{0..1}.tif"), labels=LABELS)


def hdf5(folder: Path) -> ImageParts:
    import h5py

    path = folder / "images.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=pictures(), chunks=(1, 3, TILE, TILE))
        file["label"] = LABELS
        file["mask"] = pictures()[:, 0]
    return fd.data.images(path, "images", "label", "mask")


def zarr_folder(folder: Path) -> ImageParts:
    import zarr

    group = zarr.open_group(folder / "images.zarr", mode="w")
    group.create_array("images", data=pictures(), chunks=(1, 3, TILE, TILE))
    group.create_array("label", data=np.array(LABELS))
    return fd.data.images(folder / "images.zarr", "images", "label")


def memory_map(folder: Path) -> ImageParts:
    np.save(folder / "images.npy", pictures())
    return fd.data.images(folder / "images.npy")


@pytest.mark.parametrize("make", [slides, hdf5, zarr_folder, memory_map])
def test_parts_are_those_of_the_whole(make: Callable[[Path], ImageParts], tmp_path: Path) -> None:
    found, images = make(tmp_path), torch.from_numpy(pictures())
    assert isinstance(found, fd.TileSource)
    assert (len(found), found.image_size) == (COUNT, (SIZE, SIZE))
    box = (slice(9, 40), slice(50, 64))
    for index in range(COUNT):
        whole, part = found[index], found.tile(index, box)
        if make is memory_map:
            whole, part = (whole,), (part,)
        assert torch.equal(whole[0], images[index])
        assert torch.equal(part[0], images[(index, slice(None), *box)])
        assert part[0].is_contiguous()
        if make is not memory_map:
            assert int(part[1]) == LABELS[index]
        if make is hdf5:
            assert torch.equal(part[2], images[(index, 0, *box)])
    with pytest.raises(IndexError):
        found[COUNT]


class Floats(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.double() / 128 - 1


@pytest.mark.parametrize("make", [slides, zarr_folder])
def test_each_rank_reads_its_tile_alone(make: Callable[[Path], ImageParts], tmp_path: Path) -> None:
    model = drawn(
        nn.Sequential(
            Floats(),
            nn.Conv2d(3, 4, 5, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(8),
            nn.Flatten(),
            nn.Linear(256, 2),
        )
    )
    stored = [make(tmp_path) for _ in range(4)]

    def body(run: Run, trainer: Trainer, model: nn.Module) -> Any:
        own = stored[run.rank]
        losses = [
            trainer.step(x, y).item()
            for _ in range(2)
            for x, y in trainer.loader(own, COUNT, shuffle=False)
        ]
        return losses, own.pixels_read

    found = in_stages("tiles=2x2", model, body, F.cross_entropy, tmp_path / "runs")
    batch = torch.from_numpy(pictures()), torch.tensor(LABELS)
    expected = plainly(model, [batch] * 2, F.cross_entropy).losses
    for losses, pixels in found:
        assert_close(losses, expected)
        assert pixels == 2 * COUNT * 3 * SIZE * SIZE // 4


def test_tiles_of_a_slide_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    import tifffile

    path = tmp_path / "slide.tif"
    write_slide(path, pictures()[0].transpose(1, 2, 0))
    with tifffile.TiffFile(path) as file:
        page = file.series[0].levels[0].keyframe
        begin, length = page.dataoffsets[-1], page.databytecounts[-1]
    with path.open("r+b") as raw:
        raw.seek(begin)
        raw.write(bytes(length))  # the last tile cannot be unpacked
    found = fd.data.slides(path)
    upper = found.tile(0, (slice(0, 48), slice(0, SIZE)))
    assert torch.equal(upper, torch.from_numpy(pictures()[0][:, :48]))
    with pytest.raises(DataError, match=r"slide.tif, pixels \[40:64, 0:64\]"):
        found.tile(0, (slice(40, SIZE), slice(0, SIZE)))


def test_levels_and_kinds_of_slides(tmp_path: Path) -> None:
    import tifffile

    image = pictures()[0].transpose(1, 2, 0)
    write_slide(tmp_path / "rgb.tif", image)
    half = fd.data.slides(tmp_path / "rgb.tif", level=1)
    assert torch.equal(half[0], torch.from_numpy(pictures()[0][:, ::2, ::2]))
    tifffile.imwrite(tmp_path / "grey.tif", image[..., 0], photometric="minisblack")  # in strips
    assert torch.equal(
        fd.data.slides(tmp_path / "grey.tif")[0], torch.from_numpy(pictures()[0][:1])
    )
    # Sparse: tiles that were never written are empty.
    blank = (None if number else np.full((TILE, TILE), 9, np.uint8) for number in range(16))
    options = {"shape": (SIZE, SIZE), "dtype": np.uint8, "tile": (TILE, TILE)}
    tifffile.imwrite(tmp_path / "sparse.tif", blank, photometric="minisblack", **options)
    sparse = fd.data.slides(tmp_path / "sparse.tif")[0]
    assert int(sparse.sum()) == int(sparse[0, :TILE, :TILE].sum()) == 9 * TILE * TILE


def test_slides_that_cannot_be(tmp_path: Path) -> None:
    import tifffile

    image = pictures()[0].transpose(1, 2, 0)
    write_slide(tmp_path / "0.tif", image)
    write_slide(tmp_path / "1.tif", image[:32])
    (tmp_path / "no.tif").write_bytes(b"not a slide")
    stack = np.zeros((5, SIZE, SIZE), np.uint8)
    tifffile.imwrite(tmp_path / "stack.tif", stack, photometric="minisblack")
    first = tmp_path / "0.tif"
    with pytest.raises(UserError, match=r"no level 2. It has 0: \(64, 64, 3\), 1: \(32"):
        fd.data.slides(first, level=2)
    with pytest.raises(UserError, match=r"1.tif, level 0: .*one size"):
        fd.data.slides(tmp_path / "*[01].tif")
    with pytest.raises(UserError, match="2 labels were given for 1 slides"):
        fd.data.slides(first, labels=[1, 2])
    with pytest.raises(DataError, match=r"no.tif cannot be read"):
        fd.data.slides(tmp_path / "no.tif")
    with pytest.raises(DataError, match=r"gone.tif"):
        fd.data.slides(tmp_path / "gone.tif")
    with pytest.raises(UserError, match=r"stack.tif: axes .YX of shape \(5, 64, 64\)"):
        fd.data.slides(tmp_path / "stack.tif")
    with pytest.raises(UserError, match="no slides"):
        fd.data.slides([])
    slide = fd.data.slides(first)
    write_slide(first, image[:48])
    with pytest.raises(DataError, match="has changed since the job began"):
        slide.tile(0, (slice(0, 8), slice(0, 8)))


def test_arrays_that_are_no_images(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros((4, 5)))
    with pytest.raises(UserError, match=r"shape \(4, 5\): images of 2 dimensions .* need 3 axes"):
        fd.data.images(tmp_path / "flat.npy")
    assert fd.data.images(tmp_path / "flat.npy", dims=1).image_size == (5,)
    with pytest.raises(UserError, match="dims=0"):
        fd.data.images(tmp_path / "flat.npy", dims=0)
    hdf5(tmp_path)
    with pytest.raises(UserError, match="has several arrays: images, label, mask"):
        fd.data.images(tmp_path / "images.h5")

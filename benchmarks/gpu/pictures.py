"""Pictures for `data_gpu.py`: how large everything is, and the same samples in two formats.

Sample n is made from the number n, and n is its label. So whoever reads it can compare it with what
was written.
"""

from __future__ import annotations

import io
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from farandole.data.pack.plan import make_plan
from farandole.data.pack.write import write_shards


@dataclass(frozen=True)
class Scale:
    """How large everything is. `stored` and `side` are pixels, before and after the crop."""

    model: str
    stored: int
    side: int
    samples: int
    shard: int
    batches: tuple[int, ...]
    block: int  # samples

    def steps(self, batch: int, processes: int) -> int:
        """Of a block. Each process loads whole batches, so a block has several of each."""
        return max(self.block // batch, 2 * processes)


FULL = Scale("resnet50", 256, 224, 2048, 512, (64, 128, 256), 4096)
TINY = Scale("small_cnn", 40, 32, 64, 16, (4, 8), 32)


def picture(number: int, stored: int) -> np.ndarray[Any, Any]:
    """Coarse shapes, finer ones on them, and noise: JPEG files of about a photograph's size."""
    generator = np.random.default_rng(number)
    whole = np.zeros((stored, stored, 3), np.float32)
    for cells, strength in ((6, 1.0), (stored // 4, 0.5)):
        values = generator.integers(0, 255, (cells, cells, 3), dtype=np.uint8)
        whole += strength * np.asarray(Image.fromarray(values).resize((stored, stored)), np.float32)
    whole += generator.integers(-16, 17, whole.shape)
    return np.clip(whole / 1.5, 0, 255).astype(np.uint8)


def jpeg(number: int, stored: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(number, stored)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def cropped(pixels: np.ndarray[Any, Any], side: int) -> np.ndarray[Any, Any]:
    edge = (len(pixels) - side) // 2
    return pixels[edge : edge + side, edge : edge + side]


def row(number: int, scale: Scale) -> np.ndarray[Any, Any]:
    """Channels × rows × columns."""
    return cropped(picture(number, scale.stored), scale.side).transpose(2, 0, 1).copy()


def of_jpeg(side: int, sample: Any) -> tuple[Tensor, int]:
    """Rows × columns × channels: as it is decoded, and what channels-last wants."""
    pixels = np.asarray(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))
    return torch.from_numpy(cropped(pixels, side).copy()), sample["cls"]


def of_array(sample: Any) -> tuple[Tensor, Tensor]:
    return sample["image"], sample["label"]


def write_jpegs(folder: Path, scale: Scale, pool: ProcessPoolExecutor) -> str:
    files = folder / "files"
    files.mkdir(parents=True)
    made = pool.map(partial(jpeg, stored=scale.stored), range(scale.samples), chunksize=16)
    for number, data in enumerate(made):
        (files / f"{number:06d}.jpg").write_bytes(data)
        (files / f"{number:06d}.cls").write_text(str(number))
    plan = make_plan(files, shard_bytes=1 << 30, shard_samples=scale.shard, seed=None)
    write_shards(plan, folder / "tars")
    shutil.rmtree(files)
    return plan.pattern(folder / "tars")


def write_arrays(folder: Path, scale: Scale, pool: ProcessPoolExecutor) -> str:
    folder.mkdir(parents=True)
    rows = pool.map(partial(row, scale=scale), range(scale.samples), chunksize=16)
    for begin in range(0, scale.samples, scale.shard):
        images = torch.from_numpy(np.stack(list(islice(rows, scale.shard))))
        labels = torch.arange(begin, begin + len(images))
        save_file({"image": images, "label": labels}, folder / f"{begin:06d}.safetensors")
    return str(folder / "*.safetensors")


def as_written(kind: str, number: int, scale: Scale) -> Tensor:
    """The pixels of a sample, made once more."""
    if kind == "array":
        return torch.from_numpy(row(number, scale))
    return of_jpeg(scale.side, {"jpg": jpeg(number, scale.stored), "cls": number})[0]

"""What `data_gpu.py` compares: the batches of a loader, all checked, and the step of both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from gpu.pictures import Scale, as_written
from torch import Tensor

import farandole as fd
from farandole.models import build

CLASSES = 1000
CHECKED_IMAGES = 4
MEAN, DEVIATION = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)  # of ImageNet, of 255


class CheckedInput(Iterator[tuple[Tensor, Tensor]]):
    """Batches of a loader. What was handed out is compared with what the loader announced."""

    def __init__(self, loader: fd.data.Loader, kind: str, scale: Scale) -> None:
        sampler = loader.batch_sampler
        assert sampler is not None
        order = torch.tensor(list(chain.from_iterable(sampler)))
        self._announced = order % scale.samples  # a sample's label is its number
        self._batches = iter(loader)
        self._kind, self._scale = kind, scale
        self._labels: list[Tensor] = []
        self._last = torch.empty(0)
        self.waited = 0.0
        self.checked = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        images, labels = next(self._batches)
        self.waited += time.perf_counter() - began
        self._labels.append(labels)
        self._last = images
        return images, labels

    def check(self) -> None:
        """All labels since the last time, and some images of the last batch."""
        labels = torch.cat(self._labels).cpu()
        announced = self._announced[self.checked : self.checked + len(labels)]
        if not torch.equal(labels, announced):
            raise SystemExit(f"batches after {self.checked} samples are not those of the loader")
        for image, number in zip(self._last[:CHECKED_IMAGES], self._labels[-1], strict=False):
            if not torch.equal(image.cpu(), as_written(self._kind, int(number), self._scale)):
                raise SystemExit(f"image {int(number)} is not the one that was written")
        self.checked += len(labels)
        self._labels.clear()

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]  # it is a generator


class Training:
    """The model, and the step that both sides take."""

    def __init__(self, run: fd.Run, scale: Scale, *, compiled: bool) -> None:
        self.device = run.device
        self._on_gpu = self.device.type == "cuda"
        model = build(scale.model, image_size=scale.side, channels=3, classes=CLASSES)
        model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        ready: Any = torch.compile(model, dynamic=False) if compiled else model
        self._model, self._optimizer = run.distribute(ready, optimizer)
        self._mean, self._deviation = (
            torch.tensor(each, device=self.device).view(1, 3, 1, 1) for each in (MEAN, DEVIATION)
        )

    def _normalised(self, images: Tensor) -> Tensor:
        if images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2)  # channels-last already
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return (images - self._mean) / self._deviation

    def step(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad()
        images = self._normalised(images)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._on_gpu):
            loss = F.cross_entropy(self._model(images), labels % CLASSES)
        loss.backward()
        self._optimizer.step()

    def timed(self, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> list[float]:
        """Seconds of each step, from the end of the one before to its own, on the GPU's clock."""
        self.settle()
        marks = [self._mark()]
        for images, labels in islice(batches, steps):
            self.step(images, labels)
            marks.append(self._mark())
        self.settle()
        if len(marks) != steps + 1:
            raise SystemExit(f"the data ended after {len(marks) - 1} of {steps} steps")
        if not self._on_gpu:
            return [after - before for before, after in pairwise(marks)]
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]

    def settle(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

"""What datasets of large images have in common: a sample is an image, or a part of it, and targets.

They are `TileSource`s: under a layout with tiles, each rank is asked for its own part alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from farandole.errors import DataError, FarandoleError

Box = tuple[slice, ...]


class ImageParts(Dataset[Any], ABC):
    """`pixels_read` counts those of this process, over all channels: it shows who reads what."""

    image_size: tuple[int, ...]
    pixels_read = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the image is, for messages."""

    @abstractmethod
    def read(self, index: int, box: Box) -> tuple[Any, ...]:
        """The part of the image, channels first, and the targets."""

    def __getitem__(self, index: int) -> Any:
        return self.tile(index, tuple(slice(0, size) for size in self.image_size))

    def tile(self, index: int, box: Box) -> Any:
        """The image within the box, and the targets if there are any."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        try:
            found = self.read(index, box)
        except FarandoleError:
            raise
        except Exception as error:
            where = ", ".join(f"{part.start}:{part.stop}" for part in box)
            raise DataError(
                f"{self.name(index)}, pixels [{where}]: {type(error).__name__}: {error}"
            ) from error
        self.pixels_read += int(np.prod(found[0].shape))
        return found if len(found) > 1 else found[0]


def as_tensor(part: Any) -> torch.Tensor:
    """A tensor of memory that is not a file's."""
    if isinstance(part, torch.Tensor):
        return part.contiguous()
    if isinstance(part, np.memmap) or not (isinstance(part, np.ndarray) and part.flags.writeable):
        part = np.array(part)
    return torch.from_numpy(part).contiguous()

"""Images too large to be read whole: a dataset that can read a part of one.

Under a layout with tiles each rank asks such a dataset for its own tile alone. Whatever stores
images by parts will do: a memory map, HDF5, Zarr.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset


@runtime_checkable
class TileSource(Protocol):
    """A dataset whose images all have one size and can be read in parts."""

    image_size: tuple[int, ...]
    """Of the whole images: rows and columns, say."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """A sample with its whole image."""

    def tile(self, index: int, box: tuple[slice, ...]) -> Any:
        """The same sample, with `image[..., *box]` in place of the image, and of every other tensor
        that has a value for each pixel. The slices have a start and a stop."""


class TileView(Dataset[Any]):
    """What one rank reads of a `TileSource`."""

    def __init__(self, source: TileSource, box: tuple[slice, ...]) -> None:
        self.source = source
        self.box = box

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source.tile(index, self.box)

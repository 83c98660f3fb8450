"""`fd.data.images`: large images in one array of a file, and targets beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole.data.chunks.formats.arrays import ArraySource
from farandole.data.chunks.open import array_source
from farandole.data.images.parts import Box, ImageParts, as_tensor
from farandole.errors import UserError


class ArrayImages(ImageParts):
    """Of the arrays of `source`, the one called `image` has the images."""

    def __init__(self, source: ArraySource, image: str, dims: int) -> None:
        shape = source.described[image].shape
        if len(shape) <= dims:
            raise UserError(
                f"{source.name}, {image!r} of shape {shape}: images of {dims} dimensions in an "
                f"array need {dims + 1} axes or more, the first of which counts the images."
            )
        self._source = source
        self._image = image
        self._length = shape[0]
        self.image_size = shape[-dims:]

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        return f"image {index} of {self._source.name}"

    def read(self, index: int, box: Box) -> tuple[Any, ...]:
        self._source.check_unchanged()
        with self._source.named(), self._source.opened() as arrays:
            return tuple(
                as_tensor(arrays[name][self._place(name, index, box)])
                for name in sorted(self._source.described, key=lambda name: name != self._image)
            )

    def _place(self, name: str, index: int, box: Box) -> Any:
        """An array with a value for each pixel is cut like the image, and a label is not."""
        shape, dims = self._source.described[name].shape, len(box)
        has_pixels = len(shape) > dims and shape[-dims:] == self.image_size
        return (index, *(slice(None),) * (len(shape) - 1 - dims), *box) if has_pixels else index


def images(path: str | Path, image: str | None = None, *targets: str, dims: int = 2) -> ArrayImages:
    """The images of an array, of which parts can be read: samples × channels × rows × columns.

    An HDF5 or safetensors file, a Zarr folder, or a .npy file, which is mapped. With `targets`, a
    sample is a tuple of the image and of what these arrays have in the same place; one with a value
    for each pixel is cut like the image. The last `dims` axes are those of the image.
    """
    if dims < 1:
        raise UserError(f"dims={dims}: an image has at least 1 dimension.")
    names = (*(() if image is None else (image,)), *targets)
    source = array_source(path, names)
    if image is None and len(source.described) > 1:
        raise UserError(
            f"{path} has several arrays: {', '.join(source.described)}. Name the one with the "
            f"images, and their targets: fd.data.images({str(path)!r}, …)."
        )
    return ArrayImages(source, next(iter(source.described)), dims)

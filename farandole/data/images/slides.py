"""`fd.data.slides`: pyramidal TIFF files, of which only those parts are decoded that are needed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farandole.data.chunks.formats.arrays import imported
from farandole.data.chunks.open import files_of
from farandole.data.chunks.source import FileStamp
from farandole.data.images.parts import Box, ImageParts, as_tensor
from farandole.errors import DataError, UserError

_CHANNELS = "SC"  # of one pixel: samples, as TIFF calls them, or planes


class _Kind(NamedTuple):
    """What all slides of a dataset must have in common."""

    axes: str
    shape: tuple[int, ...]
    dtype: str


class _Slide:
    """One level of a file. It is opened by the process that reads it, and stays open."""

    def __init__(self, path: Path, level: int) -> None:
        self.stamp = FileStamp.of(path)
        self._path = path
        self._level = level
        self._kept: tuple[int, Any] | None = None
        with self._tiff() as file:
            levels = self._levels(file)
            if not 0 <= level < len(levels):
                sizes = ", ".join(f"{number}: {each.shape}" for number, each in enumerate(levels))
                raise UserError(f"{path} has no level {level}. It has {sizes}.")
            found = levels[level]
            self.kind = _Kind(found.axes, found.shape, str(found.dtype))

    def array(self) -> Any:
        """What can be sliced, and decodes the parts that are needed."""
        self.stamp.check()
        if self._kept is None or self._kept[0] != os.getpid():  # a fork shares a file's position
            zarr = imported("zarr", "TIFF")
            file = self._tiff()
            weakref.finalize(self, file.close)
            store = file.aszarr(series=0, level=self._level)
            self._kept = os.getpid(), zarr.open(store, mode="r")
        return self._kept[1]

    def _tiff(self) -> Any:
        tifffile = imported("tifffile", "TIFF")
        try:
            return tifffile.TiffFile(self._path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error

    def _levels(self, file: Any) -> Sequence[Any]:
        if not file.series:
            raise UserError(f"{self._path} has no images.")
        levels: Sequence[Any] = file.series[0].levels
        return levels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


class Slides(ImageParts):
    """The first image of each file, at one level of its pyramid; channels come first."""

    def __init__(self, paths: Sequence[Path], level: int, labels: Sequence[Any] | None) -> None:
        if not paths:
            raise UserError("no slides were given.")
        if labels is not None and len(labels) != len(paths):
            raise UserError(f"{len(labels)} labels were given for {len(paths)} slides.")
        self._paths = list(paths)
        self._labels = labels
        self._slides = [_Slide(path, level) for path in paths]
        first = self._slides[0].kind
        for path, slide in zip(paths, self._slides, strict=True):
            if slide.kind != first:
                raise UserError(
                    f"{path}, level {level}: {slide.kind}, and {paths[0]} has {first}. Images that "
                    "are read in parts have one size; make datasets of slides of each size."
                )
        self._axes = first.axes
        _check_axes(paths[0], first)
        self.image_size = tuple(first.shape[first.axes.index(axis)] for axis in "YX")

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        return str(self._paths[index])

    def read(self, index: int, box: Box) -> tuple[Any, ...]:
        cut = dict(zip("YX", box, strict=True))
        whole = slice(None)
        array = self._slides[index].array()
        place = tuple(cut.get(axis, whole if axis in _CHANNELS else 0) for axis in self._axes)
        part = np.asarray(array[place])
        left = "".join(axis for axis in self._axes if axis in _CHANNELS + "YX")
        channels = next((axis for axis in left if axis in _CHANNELS), None)
        if channels is None:
            part = part[np.newaxis]
        else:
            part = part.transpose(left.index(channels), left.index("Y"), left.index("X"))
        image = as_tensor(part)
        return (image,) if self._labels is None else (image, self._labels[index])


def _check_axes(path: Path, kind: _Kind) -> None:
    sizes = dict(zip(kind.axes, kind.shape, strict=True))
    several = [axis for axis in sizes if axis not in "YX" and sizes[axis] > 1]
    channels = [axis for axis in sizes if axis in _CHANNELS]
    if not {"Y", "X"} <= sizes.keys() or any(axis not in _CHANNELS for axis in several):
        raise UserError(
            f"{path}: axes {kind.axes} of shape {kind.shape}. A slide has rows (Y) and columns "
            "(X), and channels (S or C) perhaps: write each plane into a file of its own."
        )
    if len(channels) > 1:
        raise UserError(f"{path}: axes {kind.axes} of shape {kind.shape} have channels twice.")


def slides(
    pattern: str | Path | Sequence[str | Path],
    *,
    level: int = 0,
    labels: Sequence[Any] | None = None,
) -> Slides:
    """Whole slides as images, of which parts can be read: each TIFF file is a sample.

    `pattern` is as for `fd.data.shards`. `level` 0 is full resolution; the others are those of the
    file's pyramid. A sample is a tensor (channels × rows × columns) of the file's own dtype, or a
    tuple with the slide's own of `labels`, which follow the order of the files. All slides must
    have one size at this level. Raises `UserError`, and `DataError` for a file that cannot be read.
    """
    return Slides(files_of(pattern), level, labels)
